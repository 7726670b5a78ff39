"""Synthetic artifacts, a stand-in for the CUDA driver's bindings, and tensors that claim to lie on a CUDA device."""

import copy
import ctypes
import enum
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashkda import api, artifacts, driver, kernels
from flashkda.manifest import Manifest, parse
from flashkda.planner import PREPARE_POINTERS, RECURRENCE_POINTERS

ARCHITECTURES = {"sm_90a": ("9.0", 12000), "sm_100a": ("10.0", 12080), "sm_103a": ("10.3", 12090)}
#: (kernel, bv, record order), a prepare kernel before the recurrences that read its records
VARIANTS = [
    ("prepare", None, "a"), ("recurrence", 16, "a"),
    ("prepare", None, "b"), ("recurrence", 32, "b"), ("recurrence", 64, "b"), ("recurrence", 128, "b"),
]  # fmt: skip
STRIDES = {
    "prepare": [f"{name}_stride_{dim}" for name in ("q", "k", "g", "beta") for dim in "bth"],
    "recurrence": [f"{name}_stride_{dim}" for name in ("v", "out") for dim in "bth"]
    + ["initial_stride_n", "final_stride_n", "checkpoint_stride_n"],
}
SIZES = ["seqlen", "num_seqs", "num_heads", "total_tiles", "cu_seqlens_is_int64"]
RECORD = {
    "k_decayed": (0, "bf16", [16, 128]),
    "q_decayed": (4096, "bf16", [16, 128]),
    "k_restored": (8192, "bf16", [16, 128]),
    "g_total": (12288, "fp32", [128]),
    "inv": (12800, "bf16", [3, 8, 8]),
    "mqk": (13184, "bf16", [3, 8, 8]),
    "beta_sigmoid": (13568, "bf16", [16]),
}


def kernel_parameters(kernel: str) -> list[dict[str, Any]]:
    pointers = PREPARE_POINTERS if kernel == "prepare" else RECURRENCE_POINTERS
    tail = [("scale", "f32"), ("gate_scale", "f32")]
    if kernel == "recurrence":
        names = ("initial_dtype", "final_dtype", "state_indices_is_int64", "num_slots", "checkpoint_dtype")
        names += ("num_checkpoints", "checkpoint_chunks", "checkpoint_starts_is_int64")
        tail = [(name, "i32") for name in names]
    typed = [(name, "pointer") for name in pointers] + [(name, "i64") for name in STRIDES[kernel]]
    typed += [(name, "i32") for name in SIZES] + tail
    offset, found = 0, []
    for name, kind in typed:
        size = 8 if kind in ("pointer", "i64") else 4
        found.append({"name": name, "type": kind, "offset": offset, "size": size})
        offset += size
    return found


def cubin_bytes(artifact: dict[str, Any]) -> bytes:
    """An ELF file with nothing in it but what it says of its kernel: architecture, entry and parameters."""
    sm = int(artifact["arch"][3:-1])
    attributes = struct.pack("<BBH", 3, 0x1B, 255)
    for ordinal, parameter in reversed(list(enumerate(artifact["parameters"]))):
        attributes += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, parameter["offset"], parameter["size"] << 18)
    names = b"\0.shstrtab\0.nv.info." + artifact["entry"].encode() + b"\0"
    header = struct.pack("<4s4xB7xHHI", b"\x7fELF", 8 if sm >= 100 else 7, 2, 190, 1)
    table = 64 + len(names) + len(attributes)
    header += struct.pack("<QQQIHHHHHH", 0, 0, table, sm << 8 if sm >= 100 else sm, 64, 0, 0, 64, 3, 1)
    sections = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(attributes))]
    # The kernel's file name makes every file another one.
    return (
        header + names + attributes
        + b"".join(struct.pack("<I20xQQ24x", *section) for section in sections) + artifact["file"].encode()
    )  # fmt: skip


def make_manifest() -> dict[str, Any]:
    found = []
    for arch, (capability, least_driver) in ARCHITECTURES.items():
        for kernel, bv, order in VARIANTS:
            name = order if bv is None else f"bv{bv}"
            found.append(
                {
                    "kernel": kernel,
                    "numerics": "flashkda",
                    "bv": bv,
                    "record_order": order,
                    "arch": arch,
                    "compute_capabilities": [capability],
                    "file": f"{kernel}.flashkda.{name}.{arch}.cubin",
                    "entry": f"entry_{kernel}_{name}",
                    "parameters": kernel_parameters(kernel),
                    "threads": 128 if bv is None else 160,
                    "units_per_cta": 4 if bv is None else 1,
                    "dynamic_shared_memory": 1000 if bv is None else 90000 + bv,
                    "static_shared_memory": 0,
                    "registers": 128,
                    "least_driver": least_driver,
                }
            )
            data = cubin_bytes(found[-1])
            found[-1] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    fields = []
    for name, (offset, dtype, shape) in RECORD.items():
        size = {"bf16": 2, "fp32": 4}[dtype]
        for extent in shape:
            size *= extent
        fields.append({"name": name, "offset": offset, "bytes": size, "dtype": dtype, "shape": shape})
    return {
        "schema_version": 1,
        "package_version": "0.1.0",
        "source_digest": "0" * 64,
        "toolchain": {
            "dsl": "nvidia-cutlass-dsl",
            "dsl_version": "4.8.1",
            "flavour": "cu12",
            "ptxas_version": "12.9.86",
            "options": ["--opt-level=3"],
        },
        "build_command": "flashkda-build",
        "contract": {
            "head_dim": 128,
            "chunk": 16,
            "workspace_alignment": 16,
            "record": {"bytes": 13600, "fields": fields},
        },
        "artifacts": found,
    }


def write_folder(folder: Path, raw: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for artifact in raw["artifacts"]:
        (folder / artifact["file"]).write_bytes(cubin_bytes(artifact))
    (folder / "manifest.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture
def raw_manifest() -> dict[str, Any]:
    """The manifest as JSON would give it, free to be damaged."""
    return make_manifest()


@pytest.fixture(scope="session")
def manifest_text() -> str:
    return json.dumps(make_manifest())


@pytest.fixture(scope="session")
def manifest(manifest_text: str) -> Manifest:
    return parse(manifest_text, "manifest.json", "")


@pytest.fixture(scope="session")
def cubins() -> dict[str, bytes]:
    """The stand-in for each listed cubin, by file name."""
    return {artifact["file"]: cubin_bytes(artifact) for artifact in make_manifest()["artifacts"]}


@pytest.fixture
def write_artifacts(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Write a manifest and the dummy cubins it lists; returns the folder."""
    return lambda raw: write_folder(tmp_path / "artifacts", raw)


@pytest.fixture
def artifact_folder(
    write_artifacts: Callable[[dict[str, Any]], Path], raw_manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A sound folder that FLASHKDA_ARTIFACTS names, with the process's memory of an earlier one gone."""
    folder = write_artifacts(raw_manifest)
    monkeypatch.setenv("FLASHKDA_ARTIFACTS", str(folder))
    return folder


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    artifacts.installed.cache_clear()
    driver.get_driver.cache_clear()
    monkeypatch.setattr(driver, "_forked_in_use", False)
    monkeypatch.setattr(kernels, "_devices", {})
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(api, "_calls", {})
    monkeypatch.setattr(api, "_recent", ())
    yield
    artifacts.installed.cache_clear()
    driver.get_driver.cache_clear()


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


class FakeBindings:
    """Just the part of cuda.bindings.driver that the shell calls; keeps what was loaded and launched.

    A launch reads its parameters through the addresses it is given, as the driver does.
    """

    CUfunction = int
    CUlaunchConfig = SimpleNamespace
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sm_count",
    )

    def __init__(self) -> None:
        self.version = 12090
        self.devices = [{"major": 9, "minor": 0, "sm_count": 132}, {"major": 10, "minor": 0, "sm_count": 148}]
        self.contexts = [0]
        self.capturing = 0
        self.launch_status = Status.CUDA_SUCCESS
        self.loaded: dict[int, str] = {}
        self.shared: dict[tuple[int, int], int] = {}
        self.finished: list[int] = []
        self.launches: list[SimpleNamespace] = []

    def cuInit(self, flags: int) -> tuple[Status]:
        return (Status.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.version

    def cuGetErrorName(self, status: Status) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, b"the description"

    def cuDeviceGetCount(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, len(self.devices)

    def cuDeviceGet(self, ordinal: int) -> tuple[Status, int | None]:
        if ordinal >= len(self.devices):
            return Status.CUDA_ERROR_INVALID_DEVICE, None
        return Status.CUDA_SUCCESS, ordinal

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.devices[device][attribute]

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, b"Made-up GPU\0\0\0"

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, 100 + device

    def cuCtxGetCurrent(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.contexts[-1]

    def cuCtxPushCurrent(self, context: int) -> tuple[Status]:
        self.contexts.append(context)
        return (Status.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.contexts.pop()

    def cuStreamIsCapturing(self, stream: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.capturing

    def cuLibraryLoadData(self, cubin: bytes, *options: object) -> tuple[Status, int]:
        handle = 1000 + len(self.loaded)
        self.loaded[handle] = "no kernel of it yet"
        return Status.CUDA_SUCCESS, handle

    def cuLibraryGetKernel(self, library: int, entry: bytes) -> tuple[Status, int]:
        self.loaded[library] = entry.decode()
        return Status.CUDA_SUCCESS, library

    def cuKernelSetAttribute(self, attribute: str, value: int, kernel: int, device: int) -> tuple[Status]:
        self.shared[kernel, device] = value
        return (Status.CUDA_SUCCESS,)

    def cuKernelGetFunction(self, kernel: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, kernel + 5000

    def cuFuncLoad(self, function: int) -> tuple[Status]:
        self.finished.append(function - 5000)
        return (Status.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config: SimpleNamespace, function: int, addresses: int, extra: int) -> tuple[Status]:
        entry = self.loaded[function]
        kernel = "prepare" if "prepare" in entry else "recurrence"
        values = {}
        for index, parameter in enumerate(kernel_parameters(kernel)):
            address = ctypes.c_void_p.from_address(addresses + 8 * index).value
            data = ctypes.string_at(address, parameter["size"])
            form = {"pointer": "Q", "i64": "q", "i32": "i", "f32": "f"}[parameter["type"]]
            values[parameter["name"]] = struct.unpack("<" + form, data)[0]
        self.launches.append(
            SimpleNamespace(
                entry=entry, values=values, context=self.contexts[-1], config=copy.deepcopy(vars(config)),
            )
        )  # fmt: skip
        return (self.launch_status,)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    """The stand-in driver: an H200-like device 0 and a B200-like device 1; no context is current."""
    return stand_in_driver(monkeypatch)


def stand_in_driver(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    bindings = FakeBindings()
    real_import = driver.import_module
    monkeypatch.setattr(
        driver, "import_module", lambda name: bindings if name == "cuda.bindings.driver" else real_import(name)
    )
    return bindings


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes CPU tensors that claim a CUDA device; `address` overrides where they claim to lie."""
    pytest.importorskip("torch")
    return stand_in_tensors(monkeypatch)


def stand_in_tensors(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    import torch

    streams = {0: 0, 1: 77}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)

    class OnCuda(torch.Tensor):  # type: ignore[misc, name-defined]
        ordinal = 0
        address: int | None = None

        @property
        def device(self) -> Any:
            return torch.device("cuda", self.ordinal)

        def data_ptr(self) -> int:
            return super().data_ptr() if self.address is None else self.address

    class OnSecond(OnCuda):
        # A class of its own: torch's C++ looks at a tensor's type, not at what it claims.
        ordinal = 1

    def make(tensor: Any, ordinal: int = 0, address: int | None = None) -> Any:
        claimed = tensor.as_subclass(OnCuda if ordinal == 0 else OnSecond)
        claimed.address = address
        return claimed

    real_empty = torch.empty

    def empty(*sizes: Any, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            return make(real_empty(*sizes, **options), torch.device(device).index or 0)
        return real_empty(*sizes, device=device, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return make
