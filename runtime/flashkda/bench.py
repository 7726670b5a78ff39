"""`flashkda bench`: how fast the kernels are on this machine's GPU, beside their floor and other implementations.

A report is a plain dictionary: `header` (what ran where, and whether it is `complete`), `rows` (a variant on a shape),
`host` (eager calls) and `cold_start` (fresh processes). Times are microseconds a call, in cold_start milliseconds.
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeGuard

from flashkda import __version__
from flashkda.bench_commit import checkout_commit
from flashkda.bench_peers import FLA, ORIGINAL, OURS, USUAL_PEERS, Absent, Peer, find_peer, require_present
from flashkda.bench_shapes import (
    Shape,
    chain_floor_us,
    checkpoints_of,
    copies_past_l2,
    cycles_a_chunk,
    expected_seconds,
    moved_bytes,
)
from flashkda.errors import FlashKDAError
from flashkda.resolver import cuda_version

if TYPE_CHECKING:
    from flashkda.bench_device import Clock
    from flashkda.bench_inputs import Inputs
    from flashkda.bench_measure import Timed
    from flashkda.bench_variants import Variant
    from flashkda.kernels import DeviceKernels

REPORT_VERSION = 1
_MOST_COPIES = 64
_SAME = ("reference", "equal")
_LISTS = ("rows", "host", "cold_start")


def measure(
    device: int,
    shapes: Sequence[Shape],
    samples: int,
    peers: Sequence[str] | None,
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure every shape, and the host time of eager calls.

    device: index among the visible ones; samples: a variant; peers: names of `flashkda.bench_peers.PEERS` to compare
    with, None for the usual ones where they can be imported; tell: takes a line about what is being done; keep: takes
    the report so far, before the first shape and after each.
    Raises `FlashKDAError` where the benchmark cannot run (no torch, no device, no artifact for it, no such peer).
    """
    begin = perf_counter()
    seconds = expected_seconds(shapes, tuned=FLA in (peers or ()))
    tell(f"{len(shapes)} shapes: on an H200 about {seconds:.0f} s once ready")
    bench = _Bench(device, peers)
    tell(f"ready after {perf_counter() - begin:.1f} s")
    rows: list[dict[str, Any]] = []
    keep(bench.report(progress=f"0 of {len(shapes)} shapes"))
    for number, shape in enumerate(shapes, 1):
        progress = f"{number} of {len(shapes)}"
        tell(f"{progress}: T={shape.label} H={shape.heads}")
        before = perf_counter()
        rows += bench.measure_shape(shape, samples, tell)
        now = perf_counter()
        tell(f"  {now - before:.1f} s, {now - begin:.0f} s so far")
        keep(bench.report(rows=rows, progress=f"{progress} shapes"))
    tell("host time of eager calls")
    report = bench.report(rows=rows, host=bench.host_rows(tell))
    keep(report)
    return report


def measure_cold_start(
    device: int,
    processes: int,
    at_once: int,
    peers: Sequence[str] | None,
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure process start to first result in fresh processes; a peer that fails is left out, with the reason.

    processes: of each; at_once: processes of flashkda that are then released together, 0 for none; the others as in
    `measure`, the report so far being kept after each process, and after those at once. Raises `FlashKDAError`.
    """
    from flashkda.bench_cold import ColdStarts

    bench = _Bench(device, ())
    starts = ColdStarts(device, processes, at_once, peers)

    def report(progress: str | None) -> dict[str, Any]:
        bench.left_out = starts.left_out
        return bench.report(cold_start=starts.rows(), progress=progress)

    for progress in starts.run(tell):
        keep(report(progress))
    complete = report(None)
    keep(complete)
    return complete


def write_report(report: dict[str, Any], file: Path) -> None:
    """Write a report as JSON, whole or not at all: a reader finds the old one or the new. Raises `FlashKDAError`."""
    target = file.resolve()
    if target.exists() and not target.is_file():
        raise FlashKDAError(f"{file} is not a regular file, which the report would replace")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise FlashKDAError(f"cannot write the report {file}: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def same_bits_everywhere(report: dict[str, Any]) -> bool:
    """Whether all our results had the bits of the original, or of each other where it was absent."""
    return all(row["bits"] in (None, *_SAME) for row in report["rows"])


def load_report(file: Path) -> dict[str, Any]:
    """A report that `flashkda bench --json` wrote, also before it had checkpoints or processes at once.

    One from before it could be incomplete is complete. Raises `FlashKDAError`.
    """
    remedy = "write one with flashkda bench --json"
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FlashKDAError(f"{file} is not a readable report ({error}); {remedy}") from error
    if not _has_parts(report):
        raise FlashKDAError(f"{file} is not a benchmark report of version {REPORT_VERSION}; {remedy}")
    report["header"].setdefault("complete", True)
    for row in report["rows"]:
        row.setdefault("checkpoint_every", None)
    for row in report["cold_start"]:
        row.setdefault("at_once", None)
    return report


def _has_parts(report: Any) -> TypeGuard[dict[str, Any]]:
    """Whether what was read from JSON is made of a report's parts."""
    return (
        isinstance(report, dict)
        and report.get("report_version") == REPORT_VERSION
        and isinstance(report.get("header"), dict)
        and all(isinstance(report.get(part), list) for part in _LISTS)
        and all(isinstance(row, dict) for part in _LISTS for row in report[part])
    )


class _Bench:
    """A device made ready: its kernels loaded, its clock open, the peers imported; all must be there if named."""

    def __init__(self, ordinal: int, peers: Sequence[str] | None) -> None:
        if find_spec("torch") is None:
            raise FlashKDAError("the benchmark needs torch, which is not installed; pip install torch")
        import torch

        from flashkda.api import preload
        from flashkda.bench_device import open_clock
        from flashkda.driver import get_driver
        from flashkda.kernels import device_kernels

        preload(ordinal)
        torch.cuda.set_device(ordinal)
        self.device: torch.device = torch.device("cuda", ordinal)
        self.kernels: DeviceKernels = device_kernels(ordinal)
        self.clock: Clock = open_clock(get_driver(), ordinal)
        self.driver_version = get_driver().version
        self.l2_bytes: int = torch.cuda.get_device_properties(ordinal).L2_cache_size
        self.stream: torch.cuda.Stream = torch.cuda.Stream(self.device)
        found = [find_peer(name) for name in (USUAL_PEERS if peers is None else peers)]
        self.peers = [peer for peer in found if isinstance(peer, Peer)]
        self.left_out = {peer.name: peer.reason for peer in found if isinstance(peer, Absent)}
        if peers is not None:
            require_present(self.left_out)
        self.commit = checkout_commit(Path(__file__))
        self.clocks: list[float] = []

    def measure_shape(self, shape: Shape, samples: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows of one shape. A peer that fails on it is told of and left out."""
        import torch

        from flashkda.bench_inputs import make_inputs
        from flashkda.bench_measure import capture, time_variants
        from flashkda.bench_variants import own_variants, peer_variants

        contract = self.kernels.manifest.contract
        # The lesser of the two kernels must go past the cache too.
        least = min(moved_bytes(kernel, shape, contract) for kernel in ("prepare", "recurrence"))
        copies = copies_past_l2(least, self.l2_bytes, _MOST_COPIES)
        clocks: list[float] = []
        # Another shape's blocks rarely fit, and the largest shapes need most of the memory.
        torch.cuda.empty_cache()
        with torch.inference_mode():
            sets = make_inputs(shape, contract, self.device, copies)
            torch.cuda.synchronize()
            variants, replayables = [], []
            try:
                for variant in own_variants(sets, self.kernels, checkpoints_of(shape)):
                    replayables.append(capture(variant.run, copies, self.stream))
                    variants.append(variant)
                for peer in self.peers:
                    try:
                        for variant in peer_variants(sets, peer):
                            replayables.append(capture(variant.run, copies, self.stream))
                            variants.append(variant)
                    except Exception as error:
                        tell(f"  {peer.name} fails here: {type(error).__name__}: {error}")
                bits = self._compare_bits(variants, sets)
                timed = time_variants(replayables, samples, self.stream, lambda: clocks.append(self.clock.read()))
            finally:
                for replayable in replayables:
                    replayable.graph.reset()
        self.clocks += clocks
        # The original writes no checkpoints.
        originals: dict[tuple[str, int | None], float] = {
            (variant.kernel, None): one.summary.median
            for variant, one in zip(variants, timed, strict=True)
            if variant.by == ORIGINAL
        }
        rows = []
        for variant, one, same in zip(variants, timed, bits, strict=True):
            original = originals.get((variant.kernel, variant.checkpoint_every))
            rows.append(self._row(shape, variant, one, same, median(clocks), copies, original))
        return rows

    def host_rows(self, tell: Callable[[str], None]) -> list[dict[str, Any]]:
        """Host time of eager calls, ours and the peers'. A peer that fails is told of and left out."""
        import torch

        from flashkda.bench_host import host_rows

        with torch.inference_mode():
            return host_rows(self.kernels.manifest.contract, self.device, self.peers, tell)

    def report(
        self,
        rows: Sequence[dict[str, Any]] = (),
        host: Sequence[dict[str, Any]] = (),
        cold_start: Sequence[dict[str, Any]] = (),
        progress: str | None = None,
    ) -> dict[str, Any]:
        """What was measured, with what ran where. progress: how far that is ("2 of 65 shapes"); None for all of it."""
        import torch

        facts = self.kernels.facts
        header = {
            "flashkda": __version__,
            "commit": self.commit,
            "manifest_digest": self.kernels.manifest.source_digest,
            "device": facts.name,
            "compute_capability": facts.compute_capability,
            "sm_count": facts.sm_count,
            "l2_bytes": self.l2_bytes,
            "driver_release": self.clock.driver_release,
            "driver_cuda": cuda_version(self.driver_version),
            "clock_mhz": median(self.clocks) if self.clocks else None,
            "clock_source": self.clock.source,
            "nominal_clock_mhz": self.clock.nominal_mhz,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "peers": {peer.name: peer.version for peer in self.peers},
            "left_out": self.left_out,
            "complete": progress is None,
            "progress": progress,
        }
        return {
            "report_version": REPORT_VERSION, "header": header, "rows": [*rows], "host": [*host],
            "cold_start": [*cold_start],
        }  # fmt: skip

    def _compare_bits(self, variants: "Sequence[Variant]", sets: "Sequence[Inputs]") -> list[str | None]:
        """Of each variant "reference", "equal" or "differ"; None where nothing of the kind is promised."""
        import torch

        from flashkda.bits import same_bits

        exact = {OURS, *(peer.name for peer in self.peers if peer.exact)}
        compared = [index for index, one in enumerate(variants) if one.kernel == "both" and one.by in exact]
        # The original is what bits are measured by; the first of ours is where it is absent.
        compared.sort(key=lambda index: variants[index].by == OURS)
        outcomes: list[str | None] = [None] * len(variants)
        first, reference = sets[0], None
        for index in compared:
            for tensor in (first.out, first.final_state):
                tensor.fill_(float("nan"))
            variants[index].run(0)
            torch.cuda.synchronize()
            found = (first.out, first.final_state)
            if reference is None:
                reference = [tensor.clone() for tensor in found]
                outcomes[index] = "reference"
            else:
                outcomes[index] = "equal" if all(map(same_bits, found, reference)) else "differ"
        return outcomes

    def _row(
        self,
        shape: Shape,
        variant: "Variant",
        timed: "Timed",
        bits: str | None,
        clock_mhz: float,
        copies: int,
        original_us: float | None,
    ) -> dict[str, Any]:
        contract = self.kernels.manifest.contract
        us = timed.summary.median
        floor = chain_floor_us(shape, contract.chunk, clock_mhz)
        chained = variant.kernel == "recurrence"
        gigabytes = moved_bytes(variant.kernel, shape, contract, variant.checkpoint_every) / 1e9
        return {
            "shape": shape.label,
            "lengths": list(shape.lengths),
            "tokens": shape.tokens,
            "heads": shape.heads,
            "kernel": variant.kernel,
            "by": variant.by,
            "bv": variant.bv,
            "bv_used": variant.bv_used,
            "checkpoint_every": variant.checkpoint_every,
            "us": asdict(timed.summary),
            "calls_a_sample": timed.calls,
            "copies": copies,
            # Another implementation's records have other bytes.
            "gb_per_s": gigabytes / (us * 1e-6) if variant.by == OURS else None,
            "clock_mhz": clock_mhz,
            "cycles_per_chunk": cycles_a_chunk(us, shape, contract.chunk, clock_mhz) if chained else None,
            "chain_floor_us": floor,
            "times_floor": None if variant.kernel == "prepare" else us / floor,
            "speed_up": None if original_us is None else original_us / us,
            "bits": bits,
        }
