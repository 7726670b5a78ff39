"""What every GPU test needs: a device, the compiled kernels' contract, and the oracle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS / "gpu"), str(_TESTS / "oracle")]


@pytest.fixture(scope="session")
def device():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def record(device):
    from flashkda.artifacts import installed

    return installed().manifest.contract.record


@pytest.fixture(scope="session")
def all_bv(device) -> tuple[int | None, ...]:
    """Every compiled BV and the automatic choice."""
    from flashkda.kernels import device_kernels

    return (None, *device_kernels(device.index).variants.recurrence)


@pytest.fixture(scope="session")
def spec(device, tmp_path_factory):
    import torch
    from spec import Spec, build

    try:
        library = build(tmp_path_factory.mktemp("oracle"), torch.cuda.get_device_capability(device))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return Spec(library)
