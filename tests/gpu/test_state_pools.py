"""States in pools: bits of gather, call and scatter, and nothing else read or written."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import FILL, Shape, workspace_of  # noqa: E402
from state_calls import (  # noqa: E402
    StateCall,
    assert_served,
    assert_written,
    draw_state_call,
    expected,
    make,
    padding_indices,
)

import flashkda  # noqa: E402

pytestmark = pytest.mark.gpu

RANDOM_CALLS = 40
NAN = 0xFF
#: Ragged, one empty, a gap at each end; as a batch of equal lengths: FIXED.
PACKED = Shape(T=90, H=3, cu_seqlens=(2, 23, 23, 70, 85), seed=51)
FIXED = Shape(T=37, H=2, B=3, seed=52)
POOLED = StateCall(PACKED, state_indices=(6, 0, 3, 5), slots=(7, 7), gap=8)


@pytest.mark.parametrize("seed", range(RANDOM_CALLS))
def test_a_random_pool_equals_gather_call_and_scatter(seed: int, device, record, all_bv) -> None:
    bv = all_bv[seed % len(all_bv)]
    assert_served(draw_state_call(seed, checkpoints=False), device, record, (bv,), fill=NAN if seed % 2 else FILL)


def test_random_pools_cover_every_option() -> None:
    cases = [draw_state_call(seed, checkpoints=False) for seed in range(RANDOM_CALLS)]
    pooled = [case for case in cases if case.state_indices is not None]
    dtypes = {(case.shape.initial, case.shape.final, case.shape.in_place) for case in pooled}
    assert dtypes >= {(a, b, False) for a in ("bf16", "fp32") for b in ("bf16", "fp32")}
    assert dtypes >= {("bf16", "bf16", True), ("fp32", "fp32", True)}
    assert {"none"} < {initial for initial, _, _ in dtypes} and {"none"} < {final for _, final, _ in dtypes}
    assert {case.index_dtype for case in pooled} == {torch.int32, torch.int64}
    assert {len(case.shape.sequences) - len(case.live) > 0 for case in pooled} == {False, True}
    assert {case.gap > 0 for case in pooled} == {False, True}
    assert any(case.slots[0] != case.slots[1] for case in pooled)
    for given in (pooled, [case for case in cases if case.state_indices is None]):
        assert {case.has_initial_state is None for case in given} == {False, True}
    assert {case.shape.cu_seqlens is None for case in pooled} == {False, True}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("initial", ["bf16", "fp32"])
@pytest.mark.parametrize("final", ["bf16", "fp32"])
def test_unused_slots_full_of_nan_are_no_input(initial, final, index_dtype, device, record, all_bv) -> None:
    for in_place in (False, True) if initial == final else (False,):
        shape = replace(PACKED, initial=initial, final=final, in_place=in_place)
        for started in (None, (True, False, False, True)):
            case = replace(POOLED, shape=shape, index_dtype=index_dtype, has_initial_state=started)
            assert_served(case, device, record, all_bv, fill=NAN)


@pytest.mark.parametrize("shape", [PACKED, FIXED], ids=["packed", "fixed"])
def test_a_pool_that_is_only_read_or_only_written(shape: Shape, device, record, all_bv) -> None:
    indices = (4, 2, 0, 1)[: len(shape.sequences)]
    for initial, final in (("fp32", "none"), ("none", "fp32"), ("bf16", "none"), ("none", "bf16")):
        case = StateCall(replace(shape, initial=initial, final=final), state_indices=indices, slots=(5, 5), gap=64)
        assert_served(case, device, record, all_bv)


@pytest.mark.parametrize("in_place", [False, True], ids=["two_pools", "in_place"])
def test_a_start_from_zero_does_not_touch_the_slot_but_to_write_its_end(in_place, device, record, all_bv) -> None:
    shape = replace(FIXED, initial="fp32", final="fp32", in_place=in_place)
    for started in ((False, True, False), (False, False, False)):
        # The slots that are not read hold NaN.
        pooled = StateCall(shape, state_indices=(2, 1, 3), slots=(4, 4), has_initial_state=started)
        assert_served(pooled, device, record, all_bv, fill=NAN)
        assert_served(replace(pooled, shape=replace(shape, final="none", in_place=False)), device, record, all_bv, NAN)
        # As much without a pool: sequence n has slot n.
        assert_served(StateCall(shape, has_initial_state=started), device, record, all_bv, fill=NAN)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("in_place", [False, True], ids=["two_pools", "in_place"])
def test_a_padding_request_is_neither_read_nor_written(in_place, index_dtype, device, record, all_bv) -> None:
    padding = padding_indices(4, index_dtype)
    # A live sequence of 20 tokens between any two of padding, which have 9 or none.
    lengths, indices = [], []
    live = iter((2, 0, 3, 1) * 3)
    for number, index in enumerate(padding):
        lengths += [9 if number % 3 else 0]
        indices += [index]
        if number % 3 == 2:
            lengths += [20]
            indices += [next(live)]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    shape = Shape(T=bounds[-1], H=2, cu_seqlens=tuple(bounds), initial="bf16", final="bf16", in_place=in_place, seed=53)
    case = StateCall(
        shape, state_indices=tuple(indices), index_dtype=index_dtype, slots=(4, 4), checkpoint_every=16,
        checkpoint_cu_starts=tuple(2 * n for n in range(len(lengths) + 1)), capacity=2 * len(lengths),
    )  # fmt: skip
    made = make(case, device)
    for n, (start, end) in enumerate(shape.sequences):
        if n not in case.live:
            for name in ("q", "k", "v", "g", "beta"):
                made.arguments[name][0, start:end] = float("nan")
    wanted = expected(case, made, record)
    for bv in all_bv:
        given = made.fresh()
        flashkda.fwd(**given.arguments, workspace=workspace_of(shape, device), bv=bv)
        assert_written(given, wanted)


def test_a_call_of_padding_alone_writes_nothing(device, record, all_bv) -> None:
    for shape in (PACKED, FIXED):
        indices = (-1, 7, 9, -1)[: len(shape.sequences)]
        assert_served(replace(POOLED, shape=shape, state_indices=indices), device, record, all_bv)


@pytest.mark.parametrize("slots", [(3, 5), (5, 3)], ids=str)
def test_of_two_pools_an_index_must_lie_in_both(slots, device, record, all_bv) -> None:
    shape = replace(PACKED, initial="fp32", final="bf16")
    assert_served(StateCall(shape, state_indices=(2, 4, 0, 3), slots=slots), device, record, all_bv)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("in_place", [False, True], ids=["two_pools", "in_place"])
def test_a_replay_follows_changed_indices_starts_and_lengths(in_place, index_dtype, device, record, all_bv) -> None:
    flashkda.preload(device)
    shape = replace(PACKED, in_place=in_place)
    first = replace(POOLED, shape=shape, index_dtype=index_dtype, has_initial_state=(True,) * 4)
    changes = (
        first,
        replace(first, state_indices=(1, 2, 6, 0), has_initial_state=(False, True, True, False)),
        replace(first, state_indices=(1, -1, 7, 3), shape=replace(shape, cu_seqlens=(0, 40, 60, 61, 90))),
        replace(first, state_indices=(-1, -1, -1, -1), has_initial_state=(False,) * 4),
    )
    made = [make(case, device) for case in changes]
    wanted = [expected(case, given, record) for case, given in zip(changes, made, strict=True)]
    for bv in all_bv:
        static = make(first, device)
        graph = torch.cuda.CUDAGraph()
        workspace = workspace_of(shape, device)
        with torch.cuda.graph(graph):
            flashkda.fwd(**static.arguments, workspace=workspace, bv=bv)
        for given, what in zip(made, wanted, strict=True):
            static.load(given)
            graph.replay()
            assert_written(static, what)
