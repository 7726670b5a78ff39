"""The device's clock, as NVML tells it."""

import ctypes
from dataclasses import dataclass

from flashkda.driver import Driver
from flashkda.nvml import open_nvml

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
