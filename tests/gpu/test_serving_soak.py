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

from calls import STATE_DTYPES, draw_shape, filled, make_tensors  # noqa: E402

import flashkda  # noqa: E402
from flashkda import api  # noqa: E402
from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

CALLS = 50_000
SETTLING_CALLS = 10_000
SHAPES = 160
STREAMS = 4
SECONDS = 60
MIB = 1 << 20


def resident() -> int:
    """Bytes of host memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Load:
    """One shape's inputs, results for each stream, and its first result as integers."""

    def __init__(self, seed: int, device, streams) -> None:
        shape = replace(draw_shape(seed), fused=False, pooled=False, in_place=False)
        heads = min(shape.H, 4)
        if shape.cu_seqlens is not None:
            bounds = tuple(min(bound, 120) for bound in shape.cu_seqlens[:9])
            shape = replace(shape, T=120, H=heads, cu_seqlens=bounds if len(bounds) > 1 else (0, 120))
        else:
            shape = replace(shape, T=min(shape.T, 120), H=heads, B=min(shape.B, 2))
        self.shape = shape
        tensors = make_tensors(shape, device)
        self.given = {
            name: tensors[name]
            for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
        } | {"scale": shape.scale, "lower_bound": shape.lower_bound}
        size = flashkda.workspace_size(shape.B * shape.T, shape.H, len(shape.sequences))
        self.targets = []
        for _ in streams:
            final = None
            if shape.final != "none":
                final = torch.zeros(
                    len(shape.sequences), shape.H, HEAD_DIM, HEAD_DIM, dtype=STATE_DTYPES[shape.final], device=device
                )
            self.targets.append((torch.zeros_like(tensors["q"]), final, filled(size, device)))
        self.call(0, None, True)
        self.first = [None if part is None else bits(part).clone() for part in self.targets[0][:2]]

    def call(self, stream: int, bv: int | None, own_workspace: bool) -> None:
        out, final, workspace = self.targets[stream]
        flashkda.fwd(**self.given, out=out, final_state=final, workspace=workspace if own_workspace else None, bv=bv)

    def compare(self, stream: int, wrong) -> None:
        for part, first in zip(self.targets[stream][:2], self.first, strict=True):
            if part is not None:
                wrong += (bits(part) != first).any()
                part.zero_()


def bits(tensor):
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


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
