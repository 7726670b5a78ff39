"""What the README says of callers who hold beta and gates after their activation: how exact the way back is.

The sigmoid here is an exact one; tests/gpu/test_activated_inputs.py takes the kernels' own.
"""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

LOWER_BOUND = -5.0


def every_bf16(least: float, most: float) -> "torch.Tensor":
    """All bf16 values v with least <= v < most, as fp32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[(values >= least) & (values < most)]


def beta_back(beta: "torch.Tensor") -> "torch.Tensor":
    logits = torch.logit(beta).bfloat16()
    return torch.sigmoid(logits.double())


def gate_back(gate: "torch.Tensor") -> "torch.Tensor":
    raw = torch.logit(gate / LOWER_BOUND).bfloat16()
    return LOWER_BOUND * torch.sigmoid(raw.double())


def exact_share(values: "torch.Tensor", back: Callable[["torch.Tensor"], "torch.Tensor"]) -> float:
    return (back(values).float().bfloat16().float() == values).double().mean().item()


@pytest.mark.parametrize(
    ("least", "most", "count", "exact", "relative"),
    [
        (0.5, 1.0, 128, 1.0, 0.0009),
        (0.25, 0.5, 128, 0.99, 0.0027),
        (2**-4, 0.25, 256, 0.62, 0.0071),
        (2**-7, 2**-4, 384, 0.28, 0.0156),
        (2**-20, 2**-7, 1664, 0.11, 0.0318),
    ],
)
def test_beta_comes_back_from_its_logit(least: float, most: float, count: int, exact: float, relative: float) -> None:
    beta = every_bf16(least, most)
    error = (beta_back(beta) - beta.double()).abs() / beta.double()
    assert len(beta) == count
    assert exact_share(beta, beta_back) == pytest.approx(exact, abs=0.01)
    assert error.max().item() < relative


def test_a_bf16_logit_comes_back_from_its_fp32_beta() -> None:
    logits = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    back = torch.logit(torch.sigmoid(logits.float())).bfloat16()
    assert (back == logits).double().mean().item() > 0.9999


@pytest.mark.parametrize(
    ("least", "most", "exact", "relative"),
    [(-5.0, -1.0, 1.0, 0.0032), (-1.0, -0.1, 0.46, 0.0077), (-0.1, -0.01, 0.18, 0.0157), (-0.01, -1e-6, 0.10, 0.0319)],
)
def test_a_gate_comes_back_from_its_logit(least: float, most: float, exact: float, relative: float) -> None:
    gate = every_bf16(least, most)
    error = (gate_back(gate) - gate.double()).abs()
    assert exact_share(gate, gate_back) == pytest.approx(exact, abs=0.015)
    assert (error / gate.double().abs()).max().item() < relative
    assert error.max().item() < 0.0041


def test_the_ends_are_exact_and_what_is_outside_is_nan() -> None:
    assert beta_back(torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]
    assert gate_back(torch.tensor([0.0, LOWER_BOUND])).tolist() == [0.0, LOWER_BOUND]
    assert beta_back(torch.tensor([-0.1, 1.1])).isnan().all()
    assert gate_back(torch.tensor([0.1, -5.1])).isnan().all()
