"""NVML, which comes with the driver; no compiler, no tool and no package is needed for it."""

import ctypes


def open_nvml() -> tuple[ctypes.CDLL, str] | None:
    """NVML, initialised, and the driver's release as it tells it ("580.159.04"); None where it cannot be used."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        release = ctypes.create_string_buffer(80)
        failed = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(release, len(release))
    except (OSError, AttributeError):
        return None
    return None if failed else (nvml, release.value.decode())
