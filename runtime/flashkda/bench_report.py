"""A benchmark's report, a plain dictionary, as text for a person."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from flashkda.bench_cold import in_order, name_of
from flashkda.bench_shapes import CHAIN_CYCLES

_COLUMNS = (
    f"  {'kernel':<14}{'by':<10}{'BV':>8}{'median us':>11}{'quartiles':>19}{'min':>10}{'max':>10}{'GB/s':>7}"
    f"{'cyc/chunk':>10}{'floor us':>9}{'x floor':>8}{'speed-up':>9}  bits"
)


def lines(report: dict[str, Any]) -> list[str]:
    """The whole report; parts that were not measured are left out."""
    text = header_lines(report["header"])
    for shape, rows in groupby(report["rows"], key=lambda row: (row["shape"], row["heads"])):
        text += ["", *_shape_lines(shape, list(rows))]
    if report["rows"]:
        text += [
            "",
            f"floor: {CHAIN_CYCLES} cycles a chunk of the longest sequence, the latencies of the chunk's dependent "
            "instructions (build_kernels/DESIGN.md)",
            "speed-up: the time of flash_kda's same kernel over this one's",
        ]
    if report["host"]:
        first = report["host"][0]
        text += ["", f"host time of an eager call, us (T={first['shape']} H={first['heads']})"]
        text += [f"  {row['call']:<44}{_spread(row['us'])}" for row in report["host"]]
    if report["cold_start"]:
        text += ["", "cold start, ms beyond import torch and the context"]
        for row in report["cold_start"]:
            alone = f", {row['runs']} process{'es' if row['runs'] > 1 else ''}" if row["at_once"] is None else ""
            text.append(f"  {name_of(row)}{alone}")
            text += [f"    {step:<14}{_spread(times)}" for step, times in in_order(row["ms"])]
    return text


def header_lines(header: dict[str, Any]) -> list[str]:
    """What ran where."""
    commit = f", commit {header['commit']}" if header["commit"] else ""
    return [
        f"flashkda {header['flashkda']}{commit}, manifest {header['manifest_digest'][:16]}",
        f"{header['device']}, compute capability {header['compute_capability']}, {header['sm_count']} SMs, "
        f"L2 {header['l2_bytes'] / 2**20:.0f} MiB",
        f"driver {header['driver_release'] or 'of unknown release'} (CUDA {header['driver_cuda']}), "
        f"torch {header['torch']}, Python {header['python']}",
        f"SM clock {header['clock_mhz'] or header['nominal_clock_mhz']:.0f} MHz ({header['clock_source']}; "
        f"highest {header['nominal_clock_mhz']:.0f})",
        *(f"peer {name} {version}" for name, version in header["peers"].items()),
        *(f"no peer {name}: {reason}" for name, reason in header["left_out"].items()),
        *([] if header["complete"] else [f"stopped after {header['progress']}"]),
    ]


def _shape_lines(shape: tuple[str, int], rows: list[dict[str, Any]]) -> Iterable[str]:
    label, heads = shape
    first = rows[0]
    yield (f"T={label} H={heads}: SM clock {first['clock_mhz']:.0f} MHz, {first['copies']} set(s) of tensors in turn")
    yield _COLUMNS
    for row in rows:
        us = row["us"]
        floor = None if row["times_floor"] is None else row["chain_floor_us"]
        quartiles = f"{us['lower_quartile']:.1f} - {us['upper_quartile']:.1f}"
        left = f"  {_kernel(row):<14}{row['by']:<10}{_bv(row):>8}"
        times = f"{us['median']:>11.1f}{quartiles:>19}{us['least']:>10.1f}{us['most']:>10.1f}"
        rates = f"{_number(row['gb_per_s'], '.0f'):>7}{_number(row['cycles_per_chunk'], '.0f'):>10}"
        ratios = (
            f"{_number(floor, '.1f'):>9}{_number(row['times_floor'], '.2f'):>8}{_number(row['speed_up'], '.2f'):>9}"
        )
        yield f"{left}{times}{rates}{ratios}  {row['bits'] or ''}".rstrip()
    for row in rows:
        if row["checkpoint_every"] is not None:
            plain = next(one for one in rows if _is_without_checkpoints(one, row))
            more = row["us"]["median"] / plain["us"]["median"] - 1
            yield f"  checkpoints every {row['checkpoint_every']} tokens: {more:+.1%} of the time of {row['kernel']}"


def _is_without_checkpoints(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a row is of the same call as another one, but for its checkpoints."""
    return row["checkpoint_every"] is None and all(row[key] == other[key] for key in ("by", "kernel", "bv"))


def _kernel(row: dict[str, Any]) -> str:
    return row["kernel"] if row["checkpoint_every"] is None else f"{row['kernel']}, cp {row['checkpoint_every']}"


def _bv(row: dict[str, Any]) -> str:
    if row["bv_used"] is None:
        return ""
    return str(row["bv"]) if row["bv"] is not None else f"auto {row['bv_used']}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _spread(us: dict[str, Any]) -> str:
    return (
        f"median {us['median']:>9.2f}   quartiles {us['lower_quartile']:.2f} - {us['upper_quartile']:.2f}   "
        f"min {us['least']:.2f}   max {us['most']:.2f}   ({us['count']} samples)"
    )
