"""Fifty thousand calls in one process: no memory grows, and every result equals its first."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import draw_shape, filled  # noqa: E402
from state_calls import StateCall, draw_state_call, make  # noqa: E402

import flashkda  # noqa: E402
from flashkda import api  # noqa: E402

pytestmark = pytest.mark.gpu

CALLS = 50_000
SETTLING_CALLS = 10_000
SHAPES = 160
STREAMS = 4
SECONDS = 60
MIB = 1 << 20
WRITTEN = ("out", "final_state", "checkpoints")


def resident() -> int:
    """Bytes of host memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def draw_load(seed: int) -> StateCall:
    """A small call: half of them with dense states, the others mostly in pools, every second of those that stores."""
    shape = replace(draw_shape(seed), fused=False, pooled=False, in_place=False)
    heads = min(shape.H, 4)
    if shape.cu_seqlens is not None:
        bounds = tuple(min(bound, 120) for bound in shape.cu_seqlens[:9])
        shape = replace(shape, T=120, H=heads, cu_seqlens=bounds if len(bounds) > 1 else (0, 120))
    else:
        shape = replace(shape, T=min(shape.T, 120), H=heads, B=min(shape.B, 2))
    return draw_state_call(seed, checkpoints=seed % 4 == 1, shape=shape) if seed % 2 else StateCall(shape)


class Load:
    """One call's inputs, all that it may write for each stream, and what its first run left there, as integers."""

    def __init__(self, seed: int, device, streams) -> None:
        case = draw_load(seed)
        made = make(case, device, guard=0)
        shape = case.shape
        blank = {name: part.view(torch.uint8).flatten() for name, part in made.bytes.items() if name in WRITTEN}
        # In one piece, which is compared and put back at once.
        self.blank = torch.cat(list(blank.values())).view(torch.int64)
        size = flashkda.workspace_size(shape.B * shape.T, shape.H, len(shape.sequences))
        self.given, self.targets, self.workspaces = [], [], []
        for _ in streams:
            target, offset, given = self.blank.clone(), 0, dict(made.arguments)
            for name, part in blank.items():
                like, piece = made.arguments[name], target.view(torch.uint8)[offset : offset + part.numel()]
                given[name] = piece.view(like.dtype).as_strided(like.shape, like.stride())
                offset += part.numel()
            if shape.in_place:
                given["initial_state"] = given["final_state"]
            self.given.append(given)
            self.targets.append(target)
            self.workspaces.append(filled(size, device))
        self.call(0, None, True)
        self.first = self.targets[0].clone()
        self.targets[0].copy_(self.blank)

    def call(self, stream: int, bv: int | None, own_workspace: bool) -> None:
        flashkda.fwd(**self.given[stream], workspace=self.workspaces[stream] if own_workspace else None, bv=bv)

    def compare(self, stream: int, wrong) -> None:
        wrong += (self.targets[stream] != self.first).any()
        # What a call that launches nothing would leave, and the state that one in place starts from.
        self.targets[stream].copy_(self.blank)


def test_the_drawn_loads_cover_every_way_to_keep_a_state() -> None:
    cases = [draw_load(seed) for seed in range(SHAPES)]
    pooled = [case for case in cases if case.state_indices is not None]
    for some in (cases, pooled):
        assert {case.shape.in_place for case in some} == {False, True}
        assert {case.checkpoint_every > 0 for case in some} == {False, True}
        assert {case.has_initial_state is None for case in some} == {False, True}
        assert {(case.shape.initial, case.shape.final) for case in some} >= {("fp32", "fp32"), ("bf16", "bf16")}
    assert any(case.checkpoint_rows for case in pooled if case.shape.in_place)
    assert any(case.state_indices is None and case.checkpoint_every == 0 for case in cases)
    assert any(len(case.live) < len(case.shape.sequences) for case in pooled)


def test_fifty_thousand_calls_leave_memory_and_results_as_they_were(device, all_bv) -> None:
    # More signatures than the package keeps, so that keeping and forgetting them is part of the test.
    assert SHAPES * len(all_bv) * 2 > api._KEPT_SIGNATURES
    # In a process of its own: what other tests have left on the heap would go on spreading for a while.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        wrong, kept, allocated, reserved, used, host = pool.submit(soak, device, all_bv).result(timeout=4 * SECONDS)
    assert wrong == [0] * STREAMS
    assert kept == api._KEPT_SIGNATURES
    assert allocated == 0
    assert reserved <= 4 * MIB and used <= 8 * MIB and host <= 4 * MIB, (reserved, used, host)


def soak(device, all_bv) -> tuple[list[int], int, int, int, int, int]:
    """-> wrong results by stream, kept signatures, and by how many bytes each sort of memory grew."""
    streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    loads = [Load(seed, device, streams) for seed in range(SHAPES)]
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in streams]
    torch.cuda.synchronize(device)

    def one(load: Load, stream: int, bv: int | None, own_workspace: bool) -> None:
        with torch.cuda.stream(streams[stream]):
            load.call(stream, bv, own_workspace)
            load.compare(stream, wrong[stream])

    # Once everything there is, so that what follows meets nothing new.
    for load in loads:
        for stream in range(STREAMS):
            for bv in all_bv:
                for own_workspace in (True, False):
                    one(load, stream, bv, own_workspace)

    def usage() -> tuple[int, int, int, int]:
        torch.cuda.synchronize(device)
        used = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), used[1] - used[0], resident()

    choose = random.Random(0)
    started = time.perf_counter()

    def some(count: int) -> None:
        for number in range(count):
            one(choose.choice(loads), choose.randrange(STREAMS), choose.choice(all_bv), choose.random() < 0.5)
            if number % 1000 == 0:
                assert time.perf_counter() - started < SECONDS

    # Signatures are kept and forgotten in random order from here on, which scatters the heap before it evens out.
    some(SETTLING_CALLS)
    before = usage()
    some(CALLS)
    allocated, reserved, used, host = (a - b for a, b in zip(usage(), before, strict=True))
    return [int(count) for count in wrong], len(api._calls), allocated, reserved, used, host
