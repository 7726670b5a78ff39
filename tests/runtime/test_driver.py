"""The driver shell with the real bindings, on a machine that may have no driver, and with bindings that are missing."""

import ctypes
import struct
from dataclasses import replace
from typing import Any

import pytest

from flashkda import driver
from flashkda.driver import Driver, get_driver
from flashkda.errors import DriverError
from flashkda.manifest import Manifest


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(driver, "import_module", no_module)
    with pytest.raises(DriverError, match="pip install 'cuda-python"):
        get_driver()


def test_a_missing_driver_library_is_a_driver_error(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(cuda, "cuInit", no_library)
    with pytest.raises(DriverError, match=r"libcuda\.so\.1 not found.*install or update the NVIDIA driver"):
        get_driver()


def test_a_failed_call_names_cudas_error(cuda: Any) -> None:
    with pytest.raises(DriverError, match="cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE: the description"):
        get_driver().facts(9)


def test_device_facts_are_read_without_a_context(cuda: Any) -> None:
    facts = get_driver().facts(0)
    assert (facts.name, facts.compute_capability, facts.sm_count) == ("Made-up GPU", "9.0", 132)
    assert cuda.contexts == [0]


def test_the_real_bindings_take_the_launch_configuration(manifest: Manifest, cuda: Any) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    shell = object.__new__(Driver)
    shell.bindings = bindings
    artifact = replace(manifest.artifacts[1], dynamic_shared_memory=98432)
    block = driver._ThreadBlock(shell, artifact, True)
    block.config.gridDimX = 12
    block.config.hStream = driver.LEGACY_STREAM
    assert int(block.config.hStream) == 1
    assert (block.config.blockDimX, block.config.sharedMemBytes, block.config.numAttrs) == (160, 98432, 1)
    assert block.config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert driver._ThreadBlock(shell, artifact, False).config.numAttrs == 0
    struct.pack_into("<i", block.values, artifact.parameters[-1].offset, 2)
    last = ctypes.c_void_p.from_address(block.addresses + 8 * (len(artifact.parameters) - 1)).value
    assert last is not None and ctypes.c_int32.from_address(last).value == 2
    for name in (
        "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuDeviceGetCount", "cuDeviceGet",
        "cuDeviceGetAttribute", "cuDeviceGetName", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent",
        "cuCtxPopCurrent", "cuStreamIsCapturing", "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute",
        "cuKernelGetFunction", "cuFuncLoad", "cuLaunchKernelEx", "CUfunction",
    ):  # fmt: skip
        assert hasattr(bindings, name), name
