"""Sizes past 32 bits: elements, workspace bytes, state pool and checkpoints."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from calls import Shape, call, make_tensors  # noqa: E402

import flashkda  # noqa: E402
from flashkda.bits import same_bits  # noqa: E402
from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def need(gib: int) -> None:
    """Skip where so much device memory is not free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free device memory, {free / GIB:.0f} are free")


def test_offsets_past_2_31_in_small_tensors(device, record, all_bv) -> None:
    tokens, stride = 20, 1 << 27
    need(12)
    shape = Shape(T=tokens, H=1)
    tensors = make_tensors(shape, device)
    expected = call(shape, tensors, record, None)
    far = dict(tensors)
    base = torch.empty(tokens * stride, dtype=torch.bfloat16, device=device)
    for index, name in enumerate(("q", "k", "v", "g", "beta")):
        width = tensors[name].shape[3] if name != "beta" else 1
        size = (1, tokens, 1, width) if name != "beta" else (1, tokens, 1)
        far[name] = base.as_strided(size, (0, stride, width, 1)[: len(size)], 4096 * index)
        far[name].copy_(tensors[name])
    out = torch.empty(tokens * stride, dtype=torch.bfloat16, device=device)
    out = out.as_strided((1, tokens, 1, HEAD_DIM), (0, stride, HEAD_DIM, 1))
    for bv in all_bv:
        final = torch.empty_like(expected.final_state)
        flashkda.fwd(
            *(far[name] for name in ("q", "k", "v", "g", "beta")), shape.scale, out, far["A_log"], far["dt_bias"],
            shape.lower_bound, initial_state=far["initial_state"], final_state=final, bv=bv,
        )  # fmt: skip
        assert same_bits(out, expected.out)
        assert same_bits(final, expected.final_state)


def test_the_tail_past_2_31_elements_equals_its_sequences_alone(device, record, all_bv) -> None:
    heads, every = 256, 16384
    bounds = (0, 30000, 60007, 65568)
    slots, at = 2**31 // (heads * HEAD_DIM**2) + 8, (519, 517, 518)
    # 17 of tokens, 5 of results and as much expected, 14 of workspace, 5 each of pool and checkpoints, and temporaries.
    need(64)
    generator = torch.Generator(device).manual_seed(71)
    shape = (1, bounds[-1], heads, HEAD_DIM)
    # Heads of q, k, v, g side by side: offsets within each pass 2^33 elements.
    fused = torch.empty(1, bounds[-1], 4, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    q, k, v, g = fused.normal_(generator=generator).unbind(2)
    beta = torch.randn(shape[:3], dtype=torch.bfloat16, device=device, generator=generator)
    weights = {
        "A_log": torch.rand(heads, device=device, generator=generator),
        "dt_bias": torch.rand(heads, HEAD_DIM, device=device, generator=generator),
        "scale": HEAD_DIM**-0.5,
        "lower_bound": -5.0,
    }
    states = torch.randn(3, heads, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device=device, generator=generator)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True))

    def alone(n: int, start: int, end: int):
        out = torch.empty(1, end - start, *shape[2:], dtype=torch.bfloat16, device=device)
        state = states[n : n + 1].clone()
        part = {name: tensor[:, start:end] for name, tensor in tokens.items()}
        flashkda.fwd(**part, out=out, initial_state=state, final_state=state, **weights)
        return out, state[0]

    sequences = list(pairwise(bounds))
    wanted = [alone(n, start, end) for n, (start, end) in enumerate(sequences)]
    cut = {n: alone(n, start, start + every)[1] for n, (start, end) in enumerate(sequences) if end - start > every}

    pool = torch.zeros(slots, heads, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device=device)
    checkpoints = torch.zeros_like(pool)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    size = flashkda.workspace_size(bounds[-1], heads, 3)
    assert out.numel() > 2**31 and size > 2**32 and min(at) * pool.stride(0) > 2**31
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    rows = (515, 517, 519, 520)
    for bv in all_bv:
        pool[torch.tensor(at, device=device)] = states
        flashkda.fwd(
            **tokens, out=out, initial_state=pool, final_state=pool, **weights,
            cu_seqlens=torch.tensor(bounds, device=device), state_indices=torch.tensor(at, device=device),
            checkpoints=checkpoints, checkpoint_every=every, checkpoint_cu_starts=torch.tensor(rows, device=device),
            workspace=workspace, bv=bv,
        )  # fmt: skip
        for n, (start, end) in enumerate(sequences):
            expected_out, final = wanted[n]
            assert same_bits(out[:, start:end], expected_out)
            assert same_bits(pool[at[n]], final)
            assert same_bits(checkpoints[rows[n]], states[n])
            assert n not in cut or same_bits(checkpoints[rows[n] + 1], cut[n])
        # What an offset cut to 32 bits would have hit.
        assert not pool[: min(at)].any() and not checkpoints[: rows[0]].any()
        out.zero_()
        checkpoints.zero_()
