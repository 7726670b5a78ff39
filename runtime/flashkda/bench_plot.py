"""Figures drawn from benchmarks' reports alone, so that they can be drawn again without a GPU."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashkda.bench_cold import AFTER, TOTAL, in_order, name_of
from flashkda.bench_peers import FLA, ORIGINAL, OURS, PEERS
from flashkda.errors import FlashKDAError

_USUAL_TOKENS = 8192
_STYLES = {OURS: "-", ORIGINAL: "--", FLA: ":"}
_TITLES = {ORIGINAL: ORIGINAL, FLA: "fla (Triton)"}
# 1600 pixels wide: a README shows it at about that, or half.
_DPI, _INCHES = 100, 16
_PANEL_INCHES = 6.0
_FONT = {"font.size": 13}

Point = tuple[float, float]


def speed_ups(rows: list[dict[str, Any]], over: str) -> dict[str, list[Point]]:
    """By shape: (heads, speed-up of the automatic choice over the peer `over`) of both kernels together."""
    theirs = {
        (row["shape"], row["heads"]): row["us"]["median"]
        for row in rows
        if row["by"] == over and _is_usual(row, "both")
    }
    found: dict[str, list[Point]] = {}
    for row in rows:
        us = theirs.get((row["shape"], row["heads"]))
        if row["by"] == OURS and _is_usual(row, "both") and us is not None:
            found.setdefault(row["shape"], []).append((row["heads"], us / row["us"]["median"]))
    return _sorted(found)


def times_by_tokens(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[Point]]:
    """By (whose, heads): (tokens, us) of both kernels together, fixed-length shapes, automatic choice."""
    found: dict[tuple[str, int], list[Point]] = {}
    for row in rows:
        if _is_usual(row, "both") and len(row["lengths"]) == 1:
            found.setdefault((row["by"], row["heads"]), []).append((row["tokens"], row["us"]["median"]))
    return _sorted(found)


def times_by_bv(rows: list[dict[str, Any]]) -> dict[int | None, list[Point]]:
    """By BV (None: the automatic choice): (heads, us) of the recurrence, at 8192 tokens or what comes nearest."""
    ours = [row for row in rows if row["by"] == OURS and row["kernel"] == "recurrence" and len(row["lengths"]) == 1]
    if not ours:
        return {}
    usual = min((row["tokens"] for row in ours), key=lambda tokens: (abs(tokens - _USUAL_TOKENS), tokens))
    found: dict[int | None, list[Point]] = {}
    for row in ours:
        if row["tokens"] == usual:
            found.setdefault(row["bv"], []).append((row["heads"], row["us"]["median"]))
    return _sorted(found)


def cold_steps(cold_start: list[dict[str, Any]]) -> dict[str, list[tuple[str, float]]]:
    """By a row's name: (step, median ms) of each step up to the first result, in their order."""
    return {
        name_of(row): [(step, ms["median"]) for step, ms in in_order(row["ms"]) if step not in (AFTER, TOTAL)]
        for row in cold_start
    }


def cold_axis_end(totals: Sequence[float]) -> float:
    """Where the axis of cold starts ends, in ms: past every total but those over ten times the least, which are cut."""
    return 1.25 * max(total for total in totals if total <= 10 * min(totals))


def require_matplotlib() -> None:
    """Raise `FlashKDAError` unless it is installed."""
    if find_spec("matplotlib") is None:
        raise FlashKDAError("--plot needs matplotlib, which is not installed; pip install 'flashkda[bench]'")


def draw(reports: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the figures that there are measurements for, in one image; the suffix says the format.

    Each figure is that of the first report that has measurements for it. Needs matplotlib. Raises `FlashKDAError`.
    """
    with import_module("matplotlib").rc_context(_FONT):
        figure = make_figure(reports)
        try:
            figure.savefig(file, dpi=_DPI)
        except (OSError, ValueError) as error:
            raise FlashKDAError(f"cannot write the plot {file}: {error}") from error


def titles(reports: Sequence[dict[str, Any]]) -> list[str]:
    """What ran where, once for all reports of which it is the same."""
    found = []
    for header in (report["header"] for report in reports):
        commit = f" ({header['commit']})" if header["commit"] else ""
        found.append(
            f"flashkda {header['flashkda']}{commit} on {header['device']}, driver {header['driver_release']}, "
            f"SM clock {header['clock_mhz'] or header['nominal_clock_mhz']:.0f} MHz"
        )
    return list(dict.fromkeys(found))


def make_figure(reports: Sequence[dict[str, Any]]) -> Any:
    """The matplotlib figure that `draw` writes."""
    measured = [report["rows"] for report in reports if report["rows"]]
    compared: dict[str, list[dict[str, Any]]] = {}
    for peer in PEERS:
        for rows in measured:
            if speed_ups(rows, peer):
                compared.setdefault(peer, rows)
    cold_start: list[dict[str, Any]] = next((report["cold_start"] for report in reports if report["cold_start"]), [])
    mosaic, heights = [], []
    if compared:
        mosaic.append([next(iter(compared)), next(reversed(compared))])
        heights.append(_PANEL_INCHES)
    if measured:
        mosaic.append(["tokens", "bv"])
        heights.append(_PANEL_INCHES)
    if cold_start:
        mosaic.append(["cold", "cold"])
        heights.append(1.8 + 0.6 * len(cold_start))
    figure = import_module("matplotlib.figure").Figure(figsize=(_INCHES, sum(heights) + 0.5), layout="constrained")
    panels = figure.subplot_mosaic(mosaic, height_ratios=heights) if mosaic else {}
    for peer, rows in compared.items():
        _draw_speed_ups(panels[peer], rows, peer)
    if measured:
        _draw_times_by_tokens(panels["tokens"], measured[0])
        _draw_times_by_bv(panels["bv"], measured[0])
    if cold_start:
        _draw_cold_start(panels["cold"], cold_start)
    figure.suptitle("\n".join(titles(reports)))
    return figure


def _draw_speed_ups(axes: Any, rows: list[dict[str, Any]], over: str) -> None:
    one_sequence = {row["shape"] for row in rows if len(row["lengths"]) == 1}
    by_shape = speed_ups(rows, over)
    fixed = [shape for shape in by_shape if shape in one_sequence]
    packed = [shape for shape in by_shape if shape not in one_sequence]
    for shapes, style in ((fixed, "-o"), (packed, "--s")):
        for shape, colour in zip(shapes, _colours(len(shapes)), strict=True):
            axes.plot(*zip(*by_shape[shape], strict=True), style, color=colour, markersize=4, label=f"T={shape}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    _scale_heads(axes, rows)
    _label(axes, f"Speed-up over {_TITLES[over]}, both kernels", "heads", "times faster", columns=3)


def _draw_times_by_tokens(axes: Any, rows: list[dict[str, Any]]) -> None:
    by_tokens = times_by_tokens(rows)
    heads = sorted({count for _, count in by_tokens})
    shown = sorted({heads[0], heads[len(heads) // 2], heads[-1]}) if heads else []
    for (by, count), points in by_tokens.items():
        if count in shown:
            colour = f"C{shown.index(count)}"
            axes.plot(*zip(*points, strict=True), _STYLES[by], color=colour, marker=".", label=f"{by}, H={count}")
    floors = {row["tokens"]: row["chain_floor_us"] for row in rows if len(row["lengths"]) == 1}
    if floors:
        axes.plot(*zip(*sorted(floors.items()), strict=True), color="black", linewidth=0.8, label="chain floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _label(axes, "Both kernels, one sequence", "tokens", "us")


def _draw_times_by_bv(axes: Any, rows: list[dict[str, Any]]) -> None:
    by_bv = times_by_bv(rows)
    automatic = by_bv.pop(None, [])
    for (bv, points), colour in zip(by_bv.items(), _colours(len(by_bv)), strict=True):
        axes.plot(*zip(*points, strict=True), color=colour, marker=".", label=f"BV {bv}")
    if automatic:
        style = {"color": "black", "linestyle": "none", "marker": "x"}
        axes.plot(*zip(*automatic, strict=True), label="automatic", **style)
    axes.set_ylim(bottom=0)
    _scale_heads(axes, rows)
    _label(axes, "Recurrence by BV, one sequence", "heads", "us")


def _draw_cold_start(axes: Any, cold_start: list[dict[str, Any]]) -> None:
    by_whom = cold_steps(cold_start)
    totals = {by: sum(ms for _, ms in steps) for by, steps in by_whom.items()}
    end = cold_axis_end(list(totals.values()))
    colours: dict[str, str] = {}
    for place, steps in enumerate(by_whom.values()):
        begin = 0.0
        for step, ms in steps:
            label = None if step in colours else step
            axes.barh(place, ms, left=begin, color=colours.setdefault(step, f"C{len(colours)}"), label=label)
            begin += ms
        if begin <= end:
            axes.text(begin, place, f" {begin:.0f} ms", va="center")
        else:
            said = ", ".join(f"{step} {ms / 1000:.1f} s" for step, ms in steps)
            style = {"va": "center", "ha": "right", "color": "white", "weight": "bold"}
            axes.text(end, place, f"{said} (cut off here) ", **style)
    axes.set_xlim(0, end)
    names = [
        name_of(row) + (f" ({row['runs']} process{'es' if row['runs'] > 1 else ''})" if row["at_once"] is None else "")
        for row in cold_start
    ]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    _label(axes, "Cold start: from a context to the first result, median ms", "", "", columns=5)


def _colours(count: int) -> list[Any]:
    """That many colours, no two alike and none black: the usual ones as far as they go."""
    colormaps = import_module("matplotlib").colormaps
    if count <= colormaps["tab10"].N:
        return list(colormaps["tab10"].colors[:count])
    return [colormaps["turbo"](index / (count - 1)) for index in range(count)]


def _scale_heads(axes: Any, rows: list[dict[str, Any]]) -> None:
    heads = sorted({row["heads"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(heads, heads)
    axes.minorticks_off()


def _label(axes: Any, title: str, x: str, y: str, columns: int = 4) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        # Below: inside it would hide lines.
        axes.legend(fontsize="small", ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _is_usual(row: dict[str, Any], kernel: str) -> bool:
    """Whether a row is of this kernel as one calls it: at the automatic BV, without checkpoints."""
    return bool(row["kernel"] == kernel and row["bv"] is None and row["checkpoint_every"] is None)


def _sorted(found: dict[Any, list[Point]]) -> dict[Any, list[Point]]:
    return {key: sorted(points) for key, points in found.items()}
