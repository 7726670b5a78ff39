"""Bits against the oracle on shapes that no golden has."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from calls import (  # noqa: E402
    STATE_DTYPES,
    Shape,
    Written,
    assert_same,
    assert_same_workspace,
    call,
    draw_shape,
    filled,
    make_out,
    make_tensors,
    workspace_arrays,
)

from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

RANDOM_SHAPES = 240
MODEL_SHAPES = [(heads, 1024 << step) for heads in (96, 48, 24, 12, 6) for step in range(7)]


def oracle(spec, shape: Shape, tensors) -> tuple[Written, dict]:
    """The oracle's results in the call's own dtypes; tokens of no sequence keep the fill."""
    out = make_out(Shape(shape.T, shape.H, shape.B), tensors["q"].device)
    result = spec.fwd(
        *(tensors[name] for name in ("q", "k", "v", "g", "beta")), shape.scale, tensors["A_log"], tensors["dt_bias"],
        shape.lower_bound, tensors["initial_state"], tensors["cu_seqlens"], out,
    )  # fmt: skip
    final = None if shape.final == "none" else result.final_state.to(STATE_DTYPES[shape.final])
    return Written(out, final, filled(0, out.device)), result.workspace


@pytest.mark.parametrize("seed", range(RANDOM_SHAPES))
def test_random_shape(seed: int, spec, device, record, all_bv) -> None:
    shape = draw_shape(seed)
    bv = random.Random(seed).choice(all_bv)
    tensors = make_tensors(shape, device)
    expected, arrays = oracle(spec, shape, tensors)
    for _ in range(2):
        written = call(shape, tensors, record, bv)
        assert_same(written, expected)
        assert_same_workspace(shape, workspace_arrays(shape, written, record), arrays)


def test_random_shapes_cover_every_option() -> None:
    shapes = [draw_shape(seed) for seed in range(RANDOM_SHAPES)]
    assert {(shape.initial, shape.final) for shape in shapes} == {
        (a, b) for a in ("none", "bf16", "fp32") for b in ("none", "bf16", "fp32")
    }
    packed = [shape for shape in shapes if shape.cu_seqlens]
    assert {shape.cu_dtype for shape in packed} == {torch.int32, torch.int64}
    assert max(len(shape.sequences) for shape in packed) == 4096
    assert any(start == end for shape in packed for start, end in shape.sequences)
    assert any(shape.cu_seqlens[0] > 0 for shape in packed) and any(shape.cu_seqlens[-1] < shape.T for shape in packed)
    assert {1, 2} <= {shape.H for shape in shapes} and max(shape.H for shape in shapes) > 200
    for option in ("in_place", "fused", "pooled"):
        assert {getattr(shape, option) for shape in shapes} == {False, True}
    assert any(shape.B > 1 for shape in shapes) and any(shape.lower_bound == 0 for shape in shapes)


@pytest.fixture(scope="module")
def largest(device):
    """One set of inputs, of which every model shape takes the front."""
    return make_tensors(Shape(T=65536, H=96), device)


@pytest.mark.parametrize(("heads", "tokens"), MODEL_SHAPES, ids=str)
def test_model_shape(heads: int, tokens: int, largest, spec, device, record) -> None:
    shape = Shape(T=tokens, H=heads)
    tensors = dict(largest)
    for name in "qkvg":
        front = largest[name].view(-1)[: tokens * heads * HEAD_DIM]
        tensors[name] = front.view(1, tokens, heads, HEAD_DIM)
    tensors["beta"] = largest["beta"].view(-1)[: tokens * heads].view(1, tokens, heads)
    tensors["A_log"], tensors["dt_bias"] = largest["A_log"][:heads], largest["dt_bias"][:heads]
    tensors["initial_state"] = largest["initial_state"][:, :heads]
    expected, arrays = oracle(spec, shape, tensors)
    for _ in range(2):
        written = call(shape, tensors, record, None)
        assert_same(written, expected)
    assert_same_workspace(shape, workspace_arrays(shape, written, record), arrays)
