"""What an eager call costs the host: the time of the Python call alone, the GPU keeping up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle
from typing import Any

import torch

from flashkda.api import fwd
from flashkda.bench_inputs import LOWER_BOUND, Inputs, make_inputs
from flashkda.bench_peers import Peer
from flashkda.bench_shapes import Shape
from flashkda.bench_stats import rotated, summarise
from flashkda.call import KEPT_ADDRESSES
from flashkda.manifest import Contract

_SHAPE = Shape((256,), 6)
# A batch is far from filling the driver's queue of launches, where a call would wait for the GPU.
_BATCH = 100
_BATCHES = 11
_NANOSECONDS = 1000


def host_rows(
    contract: Contract, device: torch.device, peers: Sequence[Peer], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each way to call: its name, the shape, and microseconds of the call over `_BATCH * _BATCHES` calls.

    tell: takes a line about a peer that fails, which is left out.
    """
    same, *others = make_inputs(_SHAPE, contract, device, 1 + KEPT_ADDRESSES + 1)
    calls: dict[str, Callable[[], None]] = {
        "flashkda.fwd, workspace given": _own_call(same, given=True),
        "flashkda.fwd, workspace allocated": _own_call(same, given=False),
        # Servers take their buffers from pools. One set more than a call remembers, none of them another row's, so that
        # alignment and overlap are examined each time.
        "flashkda.fwd, other buffers at each call": _in_turn([_own_call(one, given=True) for one in others]),
    }
    for call in calls.values():
        _batch_us(call)
    for peer in peers:
        try:
            call = _on_first(peer.prepare_calls([same]))
            _batch_us(call)
        except Exception as error:
            tell(f"  {peer.name} fails here: {type(error).__name__}: {error}")
        else:
            calls[peer.name] = call
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = tuple(calls)
    for turn in range(_BATCHES):
        for index in rotated(len(names), turn):
            taken[names[index]] += _batch_us(calls[names[index]])
    return [
        {"call": name, "shape": _SHAPE.label, "heads": _SHAPE.heads, "us": asdict(summarise(times))}
        for name, times in taken.items()
    ]


def _batch_us(call: Callable[[], None]) -> list[float]:
    torch.cuda.synchronize()
    now, times = time.perf_counter_ns, []
    for _ in range(_BATCH):
        begin = now()
        call()
        times.append((now() - begin) / _NANOSECONDS)
    torch.cuda.synchronize()
    return times


def _own_call(one: Inputs, given: bool) -> Callable[[], None]:
    workspace = one.workspace if given else None
    scale = one.scale

    def call() -> None:
        fwd(
            one.q, one.k, one.v, one.g, one.beta, scale, one.out, one.A_log, one.dt_bias, LOWER_BOUND,
            initial_state=one.initial_state, final_state=one.final_state, workspace=workspace,
        )  # fmt: skip

    return call


def _in_turn(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    following = cycle(calls)

    def call() -> None:
        next(following)()

    return call


def _on_first(run: Callable[[int], None]) -> Callable[[], None]:
    def call() -> None:
        run(0)

    return call
