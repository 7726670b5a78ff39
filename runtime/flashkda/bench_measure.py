"""Times from CUDA-graph replays: what the GPU takes for a call, without the host's part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashkda.bench_stats import Summary, rotated, summarise

#: A sample lasts this long at least, so that what lies between two replays does not show.
_SAMPLE_US = 250.0
_MOST_CALLS = 256


@dataclass(frozen=True, slots=True)
class Timed:
    """One variant's result: microseconds a call, and the calls in a sample."""

    summary: Summary
    calls: int


@dataclass(frozen=True, slots=True)
class Replayable:
    """Captured calls of one variant."""

    graph: torch.cuda.CUDAGraph
    calls: int


def capture(run: Callable[[int], None], copies: int, stream: torch.cuda.Stream) -> Replayable:
    """Capture `run(0) ... run(copies - 1)`, in turn, as often as makes a replay last long enough.

    run: launches on the current stream. Raises what it raises, and RuntimeError if it cannot be captured.
    """
    with torch.cuda.stream(stream):
        # Compiling, tuning and first loads, none of which may happen inside a capture.
        for index in range(copies):
            run(index)
        stream.synchronize()
        found = Replayable(_captured(run, copies, copies), copies)
        _replay_us(found, stream)
        needed = _SAMPLE_US / (copies * _replay_us(found, stream))
        rounds = min(int(needed) + 1, max(1, _MOST_CALLS // copies))
        if rounds == 1:
            return found
        found.graph.reset()
        return Replayable(_captured(run, copies * rounds, copies), copies * rounds)


def time_variants(
    replayables: Sequence[Replayable], samples: int, stream: torch.cuda.Stream, meanwhile: Callable[[], None]
) -> list[Timed]:
    """Time each of them `samples` times, in rotating order; `meanwhile` is called while the GPU is at work."""
    taken: list[list[float]] = [[] for _ in replayables]
    with torch.cuda.stream(stream):
        for turn in range(samples):
            order = rotated(len(replayables), turn)
            # The host must be ahead of the GPU from the first sample on, or its launch time would be measured with it.
            replayables[order[-1]].graph.replay()
            events = []
            for index in order:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                replayables[index].graph.replay()
                end.record()
                events.append((index, begin, end))
            meanwhile()
            stream.synchronize()
            for index, begin, end in events:
                taken[index].append(begin.elapsed_time(end) * 1000 / replayables[index].calls)
    pairs = zip(taken, replayables, strict=True)
    return [Timed(summarise(times), replayable.calls) for times, replayable in pairs]


def _captured(run: Callable[[int], None], calls: int, copies: int) -> torch.cuda.CUDAGraph:
    # torch.cuda.graph would also collect garbage and empty the allocator's cache, at every one of hundreds of captures.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for call in range(calls):
            run(call % copies)
    finally:
        graph.capture_end()
    return graph


def _replay_us(found: Replayable, stream: torch.cuda.Stream) -> float:
    """Microseconds a call, once."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    found.graph.replay()
    end.record()
    stream.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / found.calls
