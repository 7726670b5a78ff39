"""The driver shell with the real bindings, on a machine that may have no driver, and with bindings that are missing."""

import ctypes
import struct
import threading
from typing import Any

import pytest

from flashkda import driver
from flashkda.driver import Driver, Kernel, get_driver
from flashkda.errors import DriverError
from flashkda.manifest import Manifest


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(driver, "import_module", no_module)
    with pytest.raises(DriverError, match="pip install 'cuda-python"):
        get_driver()


def test_without_a_driver_its_usual_causes_are_named(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> Any:
        raise RuntimeError("what the bindings say")

    monkeypatch.setattr(cuda, "cuInit", no_library)
    with pytest.raises(DriverError, match=r"no NVIDIA driver is installed.*container.*docker run --gpus all") as caught:
        get_driver()
    assert "what the bindings say" not in str(caught.value)


def test_a_driver_without_a_function_is_too_old(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_function(*arguments: object) -> Any:
        raise RuntimeError("what the bindings say")

    monkeypatch.setattr(cuda, "cuDeviceGetName", no_function)
    with pytest.raises(DriverError, match="too old: it has no cuDeviceGetName; update the NVIDIA driver"):
        get_driver().facts(0)


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
    artifact = manifest.artifacts[1]._replace(dynamic_shared_memory=98432)
    block = driver._Block(shell, artifact)
    block.config.gridDimX = 12
    block.config.hStream = driver.LEGACY_STREAM
    assert int(block.config.hStream) == 1
    assert (block.config.blockDimX, block.config.sharedMemBytes, block.config.numAttrs) == (160, 98432, 0)
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


@pytest.fixture
def kernel(manifest: Manifest, cubins: dict[str, bytes], cuda: Any) -> Kernel:
    artifact = manifest.artifacts[0]
    return Kernel(get_driver(), artifact, cubins[artifact.file])


def block_of(manifest: Manifest, seqlen: int) -> tuple[bytes, int]:
    """A parameter block of the prepare kernel with this sequence length, and how many pointers lead it."""
    parameters = manifest.artifacts[0].parameters
    block = bytearray(parameters[-1].offset + parameters[-1].size)
    (at,) = (found.offset for found in parameters if found.name == "seqlen")
    struct.pack_into("<i", block, at, seqlen)
    return bytes(block), sum(found.type == "pointer" for found in parameters)


def test_each_launch_has_its_own_parameters_pointers_grid_and_stream(
    manifest: Manifest, kernel: Kernel, cuda: Any
) -> None:
    first, count = block_of(manifest, 100)
    second, _ = block_of(manifest, 200)
    low, high = tuple(range(16, 16 * count + 1, 16)), tuple(range(4096, 4096 + count))
    calls = [
        (1, 7, first, low), (1, 7, first, low), (1, 7, first, high), (1, 7, second, high), (2, 7, second, high),
        (2, 8, second, high), (2, 8, first, low), (1, 7, first, low),
    ]  # fmt: skip
    for call in calls:
        kernel.launch(*call)
    seen = [
        (
            launch.config["gridDimX"], launch.config["hStream"], launch.values["seqlen"],
            tuple(launch.values.values())[:count],
        )
        for launch in cuda.launches
    ]  # fmt: skip
    assert seen == [
        (grid, stream, 100 if parameters is first else 200, pointers) for grid, stream, parameters, pointers in calls
    ]


def test_a_launch_after_pointers_that_fit_no_parameter_is_right(manifest: Manifest, kernel: Kernel, cuda: Any) -> None:
    parameters, count = block_of(manifest, 100)
    pointers = tuple(range(16, 16 + count))
    kernel.launch(1, 7, parameters, pointers)
    with pytest.raises(struct.error):
        kernel.launch(1, 7, parameters, (*pointers[:-1], -1))
    kernel.launch(1, 7, parameters, pointers)
    assert [tuple(launch.values.values())[:count] for launch in cuda.launches] == [pointers, pointers]


def test_a_launch_in_the_midst_of_another_one_is_right(manifest: Manifest, kernel: Kernel, cuda: Any) -> None:
    parameters, count = block_of(manifest, 100)
    outer, inner = (16,) * count, (32,) * count
    write = kernel._write_pointers

    def interrupted(*arguments: Any) -> None:
        kernel._write_pointers = write
        write(*arguments)
        # As a signal handler does.
        kernel.launch(2, 8, parameters, inner)

    kernel._write_pointers = interrupted
    for pointers in (outer, outer, inner):
        kernel.launch(1, 7, parameters, pointers)
    seen = [(launch.config["gridDimX"], launch.config["hStream"], launch.values["q"]) for launch in cuda.launches]
    assert seen == [(2, 8, 32), (1, 7, 16), (1, 7, 16), (1, 7, 32)]


def test_each_thread_has_its_own_parameter_block(manifest: Manifest, kernel: Kernel, cuda: Any) -> None:
    parameters, count = block_of(manifest, 100)
    addresses: list[int] = []
    launch = kernel._launch
    kernel._launch = lambda *arguments: (addresses.append(arguments[2]), launch(*arguments))[1]
    threads = [
        threading.Thread(target=kernel.launch, args=(1, 7, parameters, (pointer,) * count)) for pointer in (16, 32)
    ]
    kernel.launch(1, 7, parameters, (48,) * count)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel.launch(1, 7, parameters, (48,) * count)
    assert sorted(launched.values["q"] for launched in cuda.launches) == [16, 32, 48, 48]
    assert addresses[0] == addresses[3]
    assert addresses[0] not in addresses[1:3]
