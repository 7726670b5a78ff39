"""The CUDA driver calls, through cuda.bindings.driver. What to load and launch is decided elsewhere."""

import ctypes
import os
import struct
import threading
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from flashkda.errors import DriverError
from flashkda.log import logger
from flashkda.manifest import Artifact

# Handle 0 means "the default stream of the entry point", which an environment variable can turn into the per-thread
# one; torch's default stream is always the legacy one.
LEGACY_STREAM = 1
_FUNC_LOAD_SINCE = 12040
_FORKED = (
    "CUDA was in use when this process was forked, and a forked process cannot use CUDA then; start it with "
    "multiprocessing's 'spawn' or 'forkserver' method, or fork before the first use of CUDA"
)
_NO_DRIVER = (
    "there is no CUDA driver: no NVIDIA driver is installed, or this is a container that was started without its GPU; "
    "install the driver, or start the container with the GPU (docker run --gpus all)"
)

_forked_in_use = False


class DeviceFacts(NamedTuple):
    """What the resolver and the planner need to know about a device; `ordinal` counts among the visible ones."""

    ordinal: int
    name: str
    compute_capability: str
    sm_count: int


class Driver:
    """The initialised driver. `version` counts as cuDriverGetVersion does (12080 is CUDA 12.8)."""

    def __init__(self, bindings: ModuleType) -> None:
        self.bindings = bindings
        self.call("cuInit", 0)
        self.version: int = self.call("cuDriverGetVersion")

    def call(self, name: str, *arguments: object) -> Any:
        """Call a driver function; returns its value, if it has one. Raises `DriverError` with CUDA's name and text."""
        try:
            status, *values = getattr(self.bindings, name)(*arguments)
        except RuntimeError as error:
            # The bindings look for the library, and for each function in it, at the call.
            if name == "cuInit":
                raise DriverError(_NO_DRIVER) from error
            raise DriverError(f"the CUDA driver is too old: it has no {name}; update the NVIDIA driver") from error
        if status:
            raise self.error(name, status)
        return values[0] if values else None

    def error(self, what: str, status: object) -> DriverError:
        """The exception for a failed call."""
        name = self.bindings.cuGetErrorName(status)[1] or b"unknown error"
        if what == "cuInit" and name == b"CUDA_ERROR_NOT_INITIALIZED":
            # What the driver says in the fork of a process that another library used CUDA in.
            return DriverError(_FORKED)
        text = self.bindings.cuGetErrorString(status)[1] or b"no description"
        return DriverError(f"{what} failed with {name.decode()}: {text.decode()}")

    def device_count(self) -> int:
        count: int = self.call("cuDeviceGetCount")
        return count

    def facts(self, ordinal: int) -> DeviceFacts:
        """The facts of a visible device; creates no context."""
        device = self.call("cuDeviceGet", ordinal)
        attribute = self.bindings.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        sm_count = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
        name = self.call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
        return DeviceFacts(ordinal, name, f"{major}.{minor}", sm_count)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph capture is under way on a stream of the current context."""
        status = self.call("cuStreamIsCapturing", stream)
        return bool(status != self.bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


@lru_cache(maxsize=1)
def get_driver() -> Driver:
    """The process's driver, initialised at the first call. Raises `DriverError` if there is none.

    Neither is there one in the fork of a process that had initialised it.
    """
    if _forked_in_use:
        raise DriverError(_FORKED)
    try:
        bindings = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(f"cuda-python cannot be imported ({error}); pip install 'cuda-python>=12.9,<14'") from error
    return Driver(bindings)


def _after_fork() -> None:
    global _forked_in_use
    _forked_in_use = _forked_in_use or get_driver.cache_info().currsize > 0
    get_driver.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


class PrimaryContext:
    """A device's primary context, the one torch works in; retained for the life of the process."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._get_current = driver.bindings.cuCtxGetCurrent
        self._context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", ordinal))
        self._handle = int(self._context)

    def enter(self) -> bool:
        """Make the context current if it is not; True if `leave` must follow."""
        status, current = self._get_current()
        if status:
            raise self._driver.error("cuCtxGetCurrent", status)
        if int(current) == self._handle:
            return False
        self._driver.call("cuCtxPushCurrent", self._context)
        return True

    def leave(self) -> None:
        """Restore the context that was current before `enter`."""
        self._driver.call("cuCtxPopCurrent")


class Kernel:
    """A loaded kernel. It belongs to no context: one handle runs on every device that `finish_on` was called for."""

    def __init__(self, driver: Driver, artifact: Artifact, cubin: bytes) -> None:
        self._driver = driver
        self._artifact = artifact
        library = driver.call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        self._kernel = driver.call("cuLibraryGetKernel", library, artifact.entry.encode())
        self._function = driver.bindings.CUfunction(int(self._kernel))
        self._launch = driver.bindings.cuLaunchKernelEx
        pointers = sum(parameter.type == "pointer" for parameter in artifact.parameters)
        self._write_pointers = struct.Struct(f"<{pointers}Q").pack_into
        self._thread = _ThreadBlock(driver, artifact)
        logger.debug("loaded %s (%s, %d bytes)", artifact.file, artifact.entry, artifact.size)

    def finish_on(self, ordinal: int) -> None:
        """Allow the shared memory and finish loading on a device whose primary context is current.

        A load within a stream capture would break the capture, so nothing may be left for the first launch.
        """
        limit = self._driver.bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = self._driver.call("cuDeviceGet", ordinal)
        self._driver.call("cuKernelSetAttribute", limit, self._artifact.dynamic_shared_memory, self._kernel, device)
        function = self._driver.call("cuKernelGetFunction", self._kernel)
        if self._driver.version >= _FUNC_LOAD_SINCE:
            self._driver.call("cuFuncLoad", function)

    def launch(self, grid: int, stream: int, parameters: bytes, pointers: tuple[int, ...]) -> None:
        """Launch `grid` CTAs; `parameters` is the block whose leading pointers are replaced by `pointers`.

        Raises `DriverError`.
        """
        block = self._thread.block
        if block.in_use:
            # This launch comes from a signal handler or a finalizer, in the midst of another one of this thread.
            block = self._thread.block = _Block(self._driver, self._artifact)
        try:
            block.in_use = True
            if block.parameters is not parameters or block.grid != grid or block.stream != stream:
                # Nothing is held until all of it is: an exception from a signal handler may come between any two lines.
                block.parameters = block.pointers = None
                block.values[:] = parameters
                block.config.gridDimX = block.grid = grid
                block.config.hStream = block.stream = stream
                block.parameters = parameters
            if block.pointers != pointers:
                block.pointers = None
                self._write_pointers(block.values, 0, *pointers)
                block.pointers = pointers
            status = self._launch(block.config, self._function, block.addresses, 0)[0]
        finally:
            block.in_use = False
        if status:
            raise self._driver.error(f"the launch of {self._artifact.file} with {grid} CTAs", status)


class _ThreadBlock(threading.local):
    """`block`: the calling thread's `_Block`, as a launch reads it without the GIL."""

    def __init__(self, driver: Driver, artifact: Artifact) -> None:
        self.block = _Block(driver, artifact)


class _Block:
    """A kernel's parameter block and launch configuration, and what they hold, so that only changes are written.

    values: the parameters; addresses: address of the void*[] that points at each of them; parameters: the bytes that
    `values` was last filled from; pointers: what then replaced the leading ones; grid, stream: those of `config`;
    in_use: by a launch that has not come back yet.
    """

    __slots__ = ("_table", "addresses", "config", "grid", "in_use", "parameters", "pointers", "stream", "values")

    def __init__(self, driver: Driver, artifact: Artifact) -> None:
        self.parameters: bytes | None = None
        self.pointers: tuple[int, ...] | None = None
        self.in_use = False
        self.grid = 0
        self.stream = 0
        last = artifact.parameters[-1]
        self.values = bytearray(last.offset + last.size)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.values))
        self._table = (ctypes.c_void_p * len(artifact.parameters))(
            *(base + parameter.offset for parameter in artifact.parameters)
        )
        self.addresses = ctypes.addressof(self._table)
        config = driver.bindings.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = 1
        config.blockDimX = artifact.threads
        config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = artifact.dynamic_shared_memory
        self.config = config
