"""What every test shares: `gpu` tests are skipped without a CUDA device, and a checkout's own artifacts are used."""

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import pytest

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
if (ARTIFACTS / "manifest.json").exists():
    os.environ.setdefault("FLASHKDA_ARTIFACTS", str(ARTIFACTS))


@lru_cache
def cuda_devices() -> int:
    """Number of CUDA devices; asks the driver, since importing torch for it would slow down every run."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and cuda_devices() == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
