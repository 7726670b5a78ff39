"""Checkpoints: each stored state is, bit for bit, the final state of the call on the sequence cut there.

Out and final state are compared with a call that stores none: asking for checkpoints changes no bit of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import Shape, workspace_of  # noqa: E402
from state_calls import (  # noqa: E402
    StateCall,
    assert_served,
    assert_written,
    draw_state_call,
    expected,
    make,
)

import flashkda  # noqa: E402

pytestmark = pytest.mark.gpu

RANDOM_CALLS = 30
EVERY = (16, 64, 128, 4096)
#: Ragged, one empty, one shorter than a chunk, a gap at each end.
PACKED = Shape(T=170, H=2, cu_seqlens=(3, 60, 60, 67, 164), initial="fp32", final="bf16", seed=61)
ROWS = (0, 4, 4, 5, 12)
STORED = StateCall(PACKED, checkpoint_every=16, checkpoint_cu_starts=ROWS, capacity=12)


def starts(lengths: list[int], every: int) -> tuple[int, ...]:
    """The first row of each sequence, and the number of rows."""
    found = [0]
    for length in lengths:
        found.append(found[-1] + -(-length // every))
    return tuple(found)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("every", EVERY)
def test_each_row_is_the_final_state_of_the_packed_call_cut_there(every: int, dtype, device, record, all_bv) -> None:
    # Long, empty, shorter than `every`, exactly one and two of it, just past and just short of it.
    lengths = [2 * every + 21, 0, 1, every - 1, every, every + 1, 2 * every, 15]
    bounds = [5]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    for initial, final in (("fp32", "bf16"), ("none", "fp32")):
        shape = Shape(
            T=bounds[-1] + 3, H=2, cu_seqlens=tuple(bounds), initial=initial, final=final, fused=dtype == "fp32",
            seed=every,
        )  # fmt: skip
        rows = starts(lengths, every)
        case = StateCall(
            shape, checkpoint_every=every, checkpoint_dtype=dtype, checkpoint_cu_starts=rows, capacity=rows[-1]
        )
        assert len(case.checkpoint_rows) == rows[-1]
        assert_served(case, device, record, all_bv)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("every", EVERY)
def test_each_row_is_the_final_state_of_the_fixed_call_cut_there(every: int, dtype, device, record, all_bv) -> None:
    for tokens in (5, every, 2 * every + 17):
        shape = Shape(T=tokens, H=2, B=3, initial="bf16", final="fp32", seed=tokens)
        capacity = 3 * -(-tokens // every)
        case = StateCall(shape, checkpoint_every=every, checkpoint_dtype=dtype, capacity=capacity, gap=8)
        assert len(case.checkpoint_rows) == capacity
        assert_served(case, device, record, all_bv)


def test_row_0_is_the_rounded_initial_state_or_zero(device, record) -> None:
    case = replace(STORED, has_initial_state=(True, True, False, True), checkpoint_dtype="fp32")
    made = make(case, device)
    flashkda.fwd(**made.arguments)
    stored, initial = made.pools["checkpoints"].slots, made.pools["initial_state"].slots
    assert torch.equal(stored[0], initial[0].to(torch.bfloat16).float())
    assert not stored[4].any()
    assert torch.equal(stored[5], initial[3].to(torch.bfloat16).float())


@pytest.mark.parametrize("capacity", [1, 3, 5, 11])
def test_rows_past_the_capacity_are_not_written(capacity: int, device, record, all_bv) -> None:
    assert_served(replace(STORED, capacity=capacity), device, record, all_bv)
    fixed = StateCall(Shape(T=70, H=2, B=3, seed=63), checkpoint_every=16, capacity=capacity)
    assert_served(fixed, device, record, all_bv)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_may_lie_anywhere_and_none_outside_is_written(dtype, device, record, all_bv) -> None:
    anywhere = [
        # Gaps, in front too.
        (2, 7, 9, 10, 20),
        # Some own fewer rows than they have checkpoints, or none.
        (0, 2, 2, 2, 5),
        # Before row 0, across it, and past the last row.
        (-6, -1, 0, 3, 40),
        (-2, 2, 4, 30, 40),
        # Not ascending: owning no row.
        (12, 6, 3, 1, 0),
    ]
    if dtype == torch.int64:
        # Cut to 32 bits, these would be rows 0 to 11.
        anywhere += [tuple(2**32 + row for row in ROWS), tuple(row - 2**33 for row in ROWS)]
        anywhere += [(-(2**63), 2**63 - 1, -(2**63), 2**63 - 1, 0)]
    else:
        anywhere += [(-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, 0)]
    for index, rows in enumerate(anywhere):
        case = replace(STORED, checkpoint_cu_starts=rows, starts_dtype=dtype, capacity=21 if index == 0 else 12)
        assert_served(case, device, record, (all_bv[index % len(all_bv)],))


def test_checkpoints_of_a_pool_with_padding(device, record, all_bv) -> None:
    shape = replace(PACKED, initial="bf16", in_place=True)
    case = replace(
        STORED, shape=shape, state_indices=(4, 5, -1, 1), slots=(5, 5), gap=64,
        has_initial_state=(False, True, True, True),
    )  # fmt: skip
    for indices in ((4, 5, -1, 1), (-1, 2, 0, 3), (2, 0, 1, 5)):
        for dtype in ("bf16", "fp32"):
            given = replace(case, state_indices=indices, checkpoint_dtype=dtype)
            assert_served(given, device, record, all_bv, fill=0xFF)


@pytest.mark.parametrize("seed", range(RANDOM_CALLS))
def test_random_checkpoints(seed: int, device, record, all_bv) -> None:
    assert_served(draw_state_call(500 + seed, checkpoints=True), device, record, (all_bv[seed % len(all_bv)],))


def test_random_checkpoints_cover_every_option() -> None:
    cases = [draw_state_call(500 + seed, checkpoints=True) for seed in range(RANDOM_CALLS)]
    assert all(case.checkpoint_rows for case in cases[:3])
    assert {case.checkpoint_dtype for case in cases} == {"bf16", "fp32"}
    assert {case.starts_dtype for case in cases} == {torch.int32, torch.int64}
    assert {(case.shape.cu_seqlens is None, case.checkpoint_cu_starts is None) for case in cases} == {
        (True, True), (True, False), (False, False),
    }  # fmt: skip
    assert {case.state_indices is None for case in cases} == {False, True}
    assert any(len(case.live) < len(case.shape.sequences) for case in cases)


def test_a_replay_follows_changed_rows(device, record, all_bv) -> None:
    flashkda.preload(device)
    moved = replace(PACKED, cu_seqlens=(0, 1, 50, 100, 170))
    changes = (
        STORED,
        replace(STORED, checkpoint_cu_starts=(12, 13, 13, 14, 21)),
        replace(STORED, shape=moved, checkpoint_cu_starts=starts([1, 49, 50, 70], 16)),
        replace(STORED, checkpoint_cu_starts=(-9, -9, -9, -9, -9)),
    )
    cases = [replace(case, capacity=21) for case in changes]
    made = [make(case, device) for case in cases]
    wanted = [expected(case, given, record) for case, given in zip(cases, made, strict=True)]
    for bv in all_bv:
        static = make(cases[0], device)
        workspace = workspace_of(PACKED, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashkda.fwd(**static.arguments, workspace=workspace, bv=bv)
        for given, what in zip(made, wanted, strict=True):
            static.load(given)
            graph.replay()
            assert_written(static, what)
