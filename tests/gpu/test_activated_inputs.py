"""Beta and gates given after their activation, sent back through a logit: what the kernels make of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calls import Shape, call, make_tensors, workspace_arrays  # noqa: E402

from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu


def test_every_bf16_beta_arrives_close_and_its_ends_exactly(device, record) -> None:
    values = torch.arange(1 << 16, device=device).to(torch.int16).view(torch.bfloat16).float()
    beta = values[(values >= 0) & (values <= 1) & ~torch.signbit(values)]
    shape = Shape(T=len(beta), H=1, initial="none", final="none")
    tensors = make_tensors(shape, device)
    tensors["beta"] = torch.logit(beta).bfloat16().view(1, -1, 1)
    found = workspace_arrays(shape, call(shape, tensors, record, None), record)["beta_sigmoid"]
    found = found.flatten().float()[: len(beta)]
    assert found[beta == 0].tolist() == [0.0] and found[beta == 1].tolist() == [1.0]
    # Two bf16 steps, or what the logit's rounding and the approximate tanh come to where beta is small.
    assert bool(((found - beta).abs() <= torch.clamp(beta * 2**-6, min=1e-3)).all())


def test_gates_arrive_close_and_their_ends_exactly(device, record) -> None:
    shape = Shape(T=16, H=3, initial="none", final="none", lower_bound=-5.0)
    tensors = make_tensors(shape, device)
    gates = -0.3 * torch.rand(1, 16, 3, HEAD_DIM, device=device)
    gates[:, :, 1], gates[:, :, 2] = 0.0, -5.0
    tensors["g"] = torch.logit(gates / shape.lower_bound).bfloat16()
    tensors["A_log"].zero_()
    tensors["dt_bias"].zero_()
    found = workspace_arrays(shape, call(shape, tensors, record, None), record)["g_total"][:, 0]
    wanted = gates[0].double().sum(0).exp()
    assert bool((found[1] == 1).all())
    assert bool(((found[2].double() / wanted[2]).log().abs() < 1e-3).all())
    assert bool(((found[0].double() / wanted[0]).log().abs() < 0.05).all())
