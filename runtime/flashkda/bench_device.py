"""The device's clock and versions, as NVML tells them; no compiler, no tool and no package is needed for it."""

import ctypes
from dataclasses import dataclass

from flashkda.driver import Driver

_NVML_CLOCK_SM = 1
_KILOHERTZ = 1000.0


@dataclass(frozen=True, slots=True)
class Clock:
    """A device's SM clock.

    source: where `read` has its figure from; nominal_mhz: the highest one the driver states.
    """

    source: str
    nominal_mhz: float
    driver_release: str | None
    _nvml: ctypes.CDLL | None
    _handle: ctypes.c_void_p

    def read(self) -> float:
        """The clock now, in MHz; without NVML the nominal one."""
        value = ctypes.c_uint()
        if self._nvml is None or self._nvml.nvmlDeviceGetClockInfo(self._handle, _NVML_CLOCK_SM, ctypes.byref(value)):
            return self.nominal_mhz
        return float(value.value)


def open_nvml() -> tuple[ctypes.CDLL, str] | None:
    """NVML, initialised, and the driver's release as it tells it ("580.159.04"); None where it cannot be used."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        release = ctypes.create_string_buffer(80)
        failed = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(release, len(release))
    except (OSError, AttributeError):
        return None
    return None if failed else (nvml, release.value.decode())


def open_clock(driver: Driver, ordinal: int) -> Clock:
    """The clock of a visible device. Raises `DriverError`."""
    device = driver.call("cuDeviceGet", ordinal)
    attribute = driver.bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    nominal = driver.call("cuDeviceGetAttribute", attribute, device) / _KILOHERTZ
    bus = driver.call("cuDeviceGetPCIBusId", 32, device).split(b"\0")[0]
    handle = ctypes.c_void_p()
    opened = open_nvml()
    if opened is None:
        return Clock("nominal: NVML cannot be used", nominal, None, None, handle)
    nvml, release = opened
    try:
        failed = nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetClockInfo(handle, _NVML_CLOCK_SM, ctypes.byref(ctypes.c_uint()))
    except AttributeError:
        failed = True
    if failed:
        return Clock("nominal: NVML has no clock of this device", nominal, release, None, handle)
    return Clock("NVML, read while the GPU ran the kernels", nominal, release, nvml, handle)
