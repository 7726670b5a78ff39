"""Figures drawn from a benchmark's report alone, so that they can be drawn again without a GPU."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashkda.bench_peers import ORIGINAL
from flashkda.errors import FlashKDAError

_OURS = "flashkda"
_USUAL_TOKENS = 8192
_STYLES = {_OURS: "-", ORIGINAL: "--", "fla": ":"}

Point = tuple[float, float]


def speed_ups(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """By shape: (heads, speed-up of the automatic choice over the original) of both kernels together."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        if _is_automatic(row, "both") and row["speed_up"] is not None:
            found.setdefault(row["shape"], []).append((row["heads"], row["speed_up"]))
    return _sorted(found)


def times_by_tokens(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[Point]]:
    """By (whose, heads): (tokens, us) of both kernels together, fixed-length shapes, automatic choice."""
    found: dict[tuple[str, int], list[Point]] = {}
    for row in rows:
        if row["kernel"] == "both" and row["bv"] is None and len(row["lengths"]) == 1:
            found.setdefault((row["by"], row["heads"]), []).append((row["tokens"], row["us"]["median"]))
    return _sorted(found)


def times_by_bv(rows: list[dict[str, Any]]) -> dict[int | None, list[Point]]:
    """By BV (None: the automatic choice): (heads, us) of the recurrence, at 8192 tokens or what comes nearest."""
    ours = [row for row in rows if row["by"] == _OURS and row["kernel"] == "recurrence" and len(row["lengths"]) == 1]
    if not ours:
        return {}
    usual = min((row["tokens"] for row in ours), key=lambda tokens: (abs(tokens - _USUAL_TOKENS), tokens))
    found: dict[int | None, list[Point]] = {}
    for row in ours:
        if row["tokens"] == usual:
            found.setdefault(row["bv"], []).append((row["heads"], row["us"]["median"]))
    return _sorted(found)


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the three figures side by side; the suffix says the format. Raises `FlashKDAError`."""
    if find_spec("matplotlib") is None:
        raise FlashKDAError("--plot needs matplotlib, which is not installed; pip install 'flashkda[bench]'")
    make_figure = import_module("matplotlib.figure").Figure
    header, rows = report["header"], report["rows"]
    figure = make_figure(figsize=(19, 6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)

    for shape, points in speed_ups(rows).items():
        left.plot(*zip(*points, strict=True), marker="o", label=f"T={shape}")
    left.axhline(1, color="grey", linewidth=0.8)
    _label(left, f"Speed-up over {ORIGINAL}, both kernels", "heads", "times faster")

    by_tokens = times_by_tokens(rows)
    heads = sorted({count for _, count in by_tokens}, reverse=True)
    shown = {heads[0], heads[len(heads) // 2], heads[-1]} if heads else set()
    for (by, count), points in by_tokens.items():
        if count in shown:
            colour = f"C{sorted(shown).index(count)}"
            middle.plot(*zip(*points, strict=True), _STYLES[by], color=colour, marker=".", label=f"{by}, H={count}")
    floors = {row["tokens"]: row["chain_floor_us"] for row in rows if len(row["lengths"]) == 1}
    if floors:
        middle.plot(*zip(*sorted(floors.items()), strict=True), color="grey", linewidth=0.8, label="chain floor")
    middle.set_xscale("log", base=2)
    middle.set_yscale("log")
    _label(middle, "Both kernels, one sequence", "tokens", "us")

    for bv, points in times_by_bv(rows).items():
        style = {"color": "black", "linestyle": "none", "marker": "x"} if bv is None else {"marker": "."}
        right.plot(*zip(*points, strict=True), label="automatic" if bv is None else f"BV {bv}", **style)
    right.set_ylim(bottom=0)
    _label(right, "Recurrence by BV, one sequence", "heads", "us")

    commit = f" ({header['commit']})" if header["commit"] else ""
    figure.suptitle(
        f"flashkda {header['flashkda']}{commit} on {header['device']}, driver {header['driver_release']}, "
        f"SM clock {header['clock_mhz'] or header['nominal_clock_mhz']:.0f} MHz"
    )
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise FlashKDAError(f"cannot write the plot {file}: {error}") from error


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _is_automatic(row: dict[str, Any], kernel: str) -> bool:
    return bool(row["by"] == _OURS and row["kernel"] == kernel and row["bv"] is None)


def _sorted(found: dict[Any, list[Point]]) -> dict[Any, list[Point]]:
    return {key: sorted(points) for key, points in found.items()}
