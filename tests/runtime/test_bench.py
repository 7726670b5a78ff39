"""The parts of `flashkda bench` that are only arithmetic and text: shapes, bytes, samples, order, table, figures."""

import itertools
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashkda.bench import load_report, same_bits_everywhere, write_report
from flashkda.bench_plot import cold_axis_end, cold_steps, make_figure, speed_ups, times_by_bv, times_by_tokens
from flashkda.bench_report import lines
from flashkda.bench_shapes import (
    CHECKPOINT_EVERY,
    Shape,
    chain_floor_us,
    checkpoints_of,
    copies_past_l2,
    cycles_a_chunk,
    expected_seconds,
    moved_bytes,
    select,
)
from flashkda.bench_stats import rotated, summarise
from flashkda.cli import main
from flashkda.errors import FlashKDAError
from flashkda.manifest import Manifest

US = {"median": 0.0, "lower_quartile": 1.0, "upper_quartile": 2.0, "least": 0.5, "most": 3.0, "count": 11}


def make_row(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shape": "8192", "lengths": [8192], "tokens": 8192, "heads": 96, "kernel": "both", "by": "flashkda", "bv": None,
        "bv_used": 128, "checkpoint_every": None, "us": US | {"median": 700.0}, "calls_a_sample": 1, "copies": 1,
        "gb_per_s": 2000.0, "clock_mhz": 1980.0, "cycles_per_chunk": None, "chain_floor_us": 92.6, "times_floor": 7.5,
        "speed_up": 2.0, "bits": "equal",
    }  # fmt: skip
    return row | changes


def make_report() -> dict[str, Any]:
    rows = []
    for tokens in (4096, 8192):
        for heads, us in ((96, 700.0), (24, 300.0), (6, 200.0)):
            shape = {"shape": str(tokens), "lengths": [tokens], "tokens": tokens, "heads": heads}
            rows.append(make_row(**shape, us=US | {"median": us}, speed_up=1400 / us))
            rows.append(make_row(**shape, by="flash_kda", bv_used=None, us=US | {"median": 1400.0}, speed_up=1.0))
            rows.append(make_row(**shape, us=US | {"median": 1.02 * us}, checkpoint_every=64, speed_up=None))
            for bv in (None, 32, 64):
                part = {"kernel": "recurrence", "bv": bv, "bv_used": bv or 32, "bits": None}
                rows.append(make_row(**shape, **part, us=US | {"median": us + (bv or 0)}))
    packed: dict[str, Any] = {"shape": "8x1024", "lengths": [1024] * 8, "heads": 24}
    rows.append(make_row(**packed, speed_up=3.0))
    rows.append(make_row(**packed, by="flash_kda", bv_used=None, us=US | {"median": 2100.0}, speed_up=1.0))
    rows.append(make_row(**packed, by="fla", bv_used=None, us=US | {"median": 3500.0}, speed_up=0.6))
    header = {
        "flashkda": "0.1.0", "commit": "0123456789ab", "manifest_digest": "f" * 64, "device": "Made-up GPU",
        "compute_capability": "9.0", "sm_count": 132, "l2_bytes": 60 << 20, "driver_release": "580.1",
        "driver_cuda": "13.0", "clock_mhz": 1980.0, "clock_source": "NVML", "nominal_clock_mhz": 1980.0,
        "torch": "2.11", "python": "3.12", "peers": {"flash_kda": "1ce47ea", "fla": "0.6.0"},
        "left_out": {"another": "not installed"}, "complete": True, "progress": None,
    }  # fmt: skip
    host = [{"call": "flashkda.fwd, workspace given", "shape": "256", "heads": 6, "us": US | {"median": 14.5}}]
    cold = [
        make_cold_row("flashkda", 10, {"import": 7.5, "load": 8.0, "first call": 25.5}),
        make_cold_row("fla", 1, {"import": 3000.0, "first call": 81000.0}),
    ]
    return {"report_version": 1, "header": header, "rows": rows, "host": host, "cold_start": cold}


def make_cold_row(by: str, runs: int, steps: dict[str, float], at_once: int | None = None) -> dict[str, Any]:
    medians = steps | {"second call": 0.1, "total": sum(steps.values())}
    summaries = {step: US | {"median": ms} for step, ms in medians.items()}
    return {"by": by, "runs": runs, "at_once": at_once, "ms": summaries}


@pytest.fixture
def report_file(tmp_path: Path) -> Path:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(make_report()))
    return file


def with_at_once(report: dict[str, Any]) -> dict[str, Any]:
    """The report with a row of eight processes at once, after the single ones."""
    alone, *peers = report["cold_start"]
    at_once = make_cold_row("flashkda", 8, {"import": 9.5, "load": 20.0, "first call": 33.5}, at_once=8)
    return report | {"cold_start": [alone, at_once, *peers]}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


# --- shapes, bytes, cycles -----------------------------------------------------------------------


def test_the_full_selection_is_every_length_and_the_packed_shapes() -> None:
    shapes = select((), (), quick=False)
    fixed = [shape for shape in shapes if not shape.packed]
    assert {(shape.tokens, shape.heads) for shape in fixed} == {
        (1024 << step, heads) for step in range(7) for heads in (96, 64, 48, 32, 24, 12, 6)
    }
    packed = {shape.label for shape in shapes if shape.packed}
    assert packed == {"1300+547+2048+963+271+3063", "8x1024", "32x512", "64x128"}
    assert {shape.heads for shape in shapes if shape.packed} == {96, 24, 12, 6}
    assert len(shapes) == len(set(shapes)) == 7 * 7 + 4 * 4


def test_quick_is_a_part_of_the_full_selection() -> None:
    quick = select((), (), quick=True)
    assert set(quick) < set(select((), (), quick=False))
    assert {shape.label for shape in quick} == {"8192", "8x1024", "1300+547+2048+963+271+3063"}


def test_given_heads_and_tokens_replace_the_usual_ones() -> None:
    assert select((100, 200), (3,), quick=False) == [Shape((100,), 3), Shape((200,), 3)]
    assert {shape.heads for shape in select((), (5,), quick=True)} == {5}


def test_a_sequences_last_chunk_counts_whole() -> None:
    shape = Shape((17, 16, 1), 2)
    assert shape.chunks(16) == 4
    assert shape.longest_chain(16) == 2


def test_moved_bytes_are_each_input_and_output_once(manifest: Manifest) -> None:
    shape = Shape((8192,), 96)
    elements = 8192 * 96 * 128
    records = 512 * 96 * 13600
    prepare = moved_bytes("prepare", shape, manifest.contract)
    recurrence = moved_bytes("recurrence", shape, manifest.contract)
    assert prepare == 3 * 2 * elements + 2 * 8192 * 96 + records
    assert recurrence == 2 * 2 * elements + records
    assert moved_bytes("both", shape, manifest.contract) == prepare + recurrence
    assert moved_bytes("both", shape, manifest.contract, 64) == prepare + recurrence + 128 * 96 * 128 * 128 * 2


def test_a_checkpoint_is_moved_for_every_piece_of_a_sequence_begun(manifest: Manifest) -> None:
    shape = Shape((65, 64, 1), 2)
    more = moved_bytes("recurrence", shape, manifest.contract, 64) - moved_bytes("recurrence", shape, manifest.contract)
    assert more == 4 * 2 * 128 * 128 * 2


def test_checkpoints_are_measured_beside_the_plain_call_at_few_and_at_many_heads() -> None:
    measured = {shape: checkpoints_of(shape) for quick in (True, False) for shape in select((), (), quick)}
    assert {shape: every for shape, every in measured.items() if every is not None} == {
        Shape((8192,), 12): CHECKPOINT_EVERY, Shape((8192,), 96): CHECKPOINT_EVERY
    }  # fmt: skip


def test_what_tunes_itself_takes_longer_with_every_number_of_heads() -> None:
    def tuning(*shapes: Shape) -> float:
        return expected_seconds(shapes, tuned=True) - expected_seconds(shapes, tuned=False)

    one = tuning(Shape((8192,), 6))
    assert one > expected_seconds(select((), (), quick=False), tuned=False)
    assert tuning(Shape((8192,), 6), Shape((1024,), 6)) == pytest.approx(one)
    assert tuning(Shape((8192,), 6), Shape((8192,), 12)) == pytest.approx(2 * one)


def test_small_shapes_take_turns_past_l2_and_large_ones_need_one_set() -> None:
    assert copies_past_l2(10 << 20, 60 << 20, limit=64) == 12
    assert copies_past_l2(121 << 20, 60 << 20, limit=64) == 1
    assert copies_past_l2(1, 60 << 20, limit=64) == 64


def test_floor_and_cycles_follow_the_longest_sequence() -> None:
    shape = Shape((8192, 16), 6)
    assert chain_floor_us(shape, 16, 1980.0) == pytest.approx(92.6, abs=0.05)
    assert cycles_a_chunk(chain_floor_us(shape, 16, 1500.0), shape, 16, 1500.0) == pytest.approx(358)


# --- samples -------------------------------------------------------------------------------------


def test_a_summary_does_not_depend_on_the_samples_order() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 100.0]
    for seed in range(5):
        shuffled = random.Random(seed).sample(samples, len(samples))
        found = summarise(shuffled)
        assert (found.count, found.least, found.lower_quartile, found.median) == (5, 1.0, 2.0, 3.0)
        assert (found.upper_quartile, found.most) == (4.0, 100.0)
    assert summarise([3.0, 1.0]).median == statistics.median([1.0, 3.0])


def test_a_single_sample_is_its_own_summary() -> None:
    found = summarise([7.0])
    assert (found.count, found.least, found.lower_quartile, found.median) == (1, 7.0, 7.0, 7.0)
    assert (found.upper_quartile, found.most) == (7.0, 7.0)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_every_variant_is_once_in_a_round_and_everywhere_over_the_rounds(count: int) -> None:
    rounds = [rotated(count, turn) for turn in range(count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert {order[0] for order in rounds} == set(range(count))


def test_no_variant_always_follows_the_same_one() -> None:
    followers: dict[int, set[int]] = {}
    for turn in range(11):
        order = rotated(6, turn)
        for before, after in itertools.pairwise(order):
            followers.setdefault(after, set()).add(before)
    assert all(len(before) > 1 for before in followers.values())


# --- the report ----------------------------------------------------------------------------------


def test_the_table_has_every_row_with_its_figures() -> None:
    text = "\n".join(lines(make_report()))
    for part in (
        "flashkda 0.1.0, commit 0123456789ab", "Made-up GPU", "driver 580.1 (CUDA 13.0)", "SM clock 1980 MHz",
        "peer flash_kda 1ce47ea", "no peer another: not installed", "T=8192 H=96: SM clock 1980 MHz", "92.6",
        "auto 128", "T=8x1024 H=24", "workspace given", "14.50", "cold start", "41.00", "flashkda, 10 processes",
        "fla, 1 process\n", "both, cp 64",
    ):  # fmt: skip
        assert part in text, part
    assert sum(line.startswith(("  both", "  recurrence")) for line in text.splitlines()) == len(make_report()["rows"])


def test_checkpoints_cost_is_told_against_the_plain_call() -> None:
    report = make_report()
    assert lines(report).count("  checkpoints every 64 tokens: +2.0% of the time of both") == 6
    report["rows"] = [row for row in report["rows"] if row["checkpoint_every"] is None]
    assert not any("checkpoints" in line for line in lines(report))


def test_a_report_from_before_checkpoints_is_still_shown(report_file: Path) -> None:
    report = make_report()
    report["rows"] = [row for row in report["rows"] if row["checkpoint_every"] is None]
    shown = lines(report)
    for row in report["rows"]:
        del row["checkpoint_every"]
    report_file.write_text(json.dumps(report))
    assert run("--from", str(report_file)).output == "\n".join(shown) + "\n"


def test_processes_at_once_are_shown_after_the_single_ones(report_file: Path) -> None:
    report_file.write_text(json.dumps(with_at_once(make_report())))
    shown = run("--from", str(report_file)).output.splitlines()
    heads = ["  flashkda, 10 processes", "  flashkda, 8 at once", "  fla, 1 process"]
    assert [line for line in shown if line in heads] == heads
    begin, end = shown.index(heads[1]), shown.index(heads[2])
    assert any(line.startswith("    total") and "63.00" in line for line in shown[begin:end])
    assert [*shown[:begin], *shown[end:]] == lines(make_report())


def test_a_report_from_before_processes_at_once_is_still_shown(report_file: Path) -> None:
    report = make_report()
    shown = lines(report)
    for row in report["cold_start"]:
        del row["at_once"]
    report_file.write_text(json.dumps(report))
    assert run("--from", str(report_file)).output == "\n".join(shown) + "\n"
    assert [row["at_once"] for row in load_report(report_file)["cold_start"]] == [None, None]
    assert "at once" not in "\n".join(shown)


def test_a_report_from_before_it_could_be_incomplete_is_complete(report_file: Path) -> None:
    report = make_report()
    del report["header"]["complete"], report["header"]["progress"]
    report_file.write_text(json.dumps(report))
    assert load_report(report_file)["header"]["complete"] is True
    assert "stopped" not in run("--from", str(report_file)).output


def test_an_incomplete_report_says_how_far_it_is(report_file: Path) -> None:
    report = make_report()
    report["header"] |= {"complete": False, "progress": "6 of 65 shapes"}
    report_file.write_text(json.dumps(report))
    assert "stopped after 6 of 65 shapes" in run("--from", str(report_file)).output.splitlines()


def test_several_reports_are_shown_one_after_another(report_file: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.json"
    report = make_report()
    report["rows"][0]["bits"] = "differ"
    second.write_text(json.dumps(report))
    both = run("--from", str(report_file), "--from", str(second))
    assert both.output == run("--from", str(report_file)).output + "\n" + run("--from", str(second)).output
    assert both.exit_code == 1


def test_columns_line_up() -> None:
    table = lines(make_report())
    head = next(line for line in table if "median us" in line)
    row = next(line for line in table if line.startswith("  both"))
    for title, value in (
        ("median us", "700.0"),
        ("GB/s", "2000"),
        ("floor us", "92.6"),
        ("x floor", "7.50"),
        ("speed-up", "2.00"),
    ):
        assert head.index(title) + len(title) == row.index(value) + len(value)


def test_different_bits_are_an_error(report_file: Path) -> None:
    report = make_report()
    assert same_bits_everywhere(report)
    assert run("--from", str(report_file)).exit_code == 0
    report["rows"][0]["bits"] = "differ"
    assert not same_bits_everywhere(report)
    report_file.write_text(json.dumps(report))
    assert run("--from", str(report_file)).exit_code == 1


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "1", '{"report_version": 0}', '{"report_version": 1}', '{"schema_version": 1}',
        '{"report_version": 1, "header": [], "rows": [], "host": [], "cold_start": []}',
        '{"report_version": 1, "header": {}, "rows": {}, "host": [], "cold_start": []}',
        '{"report_version": 1, "header": {}, "rows": [1], "host": [], "cold_start": []}',
    ],
)  # fmt: skip
def test_another_file_is_refused_by_name(report_file: Path, text: str) -> None:
    report_file.write_text(text)
    with pytest.raises(FlashKDAError, match=r"report\.json"):
        load_report(report_file)
    failed = run("--from", str(report_file))
    assert failed.exit_code == 1 and "flashkda bench --json" in failed.output


def test_a_report_that_lacks_something_is_refused_by_name(report_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for part, key in (("header", "commit"), ("rows", "us"), ("rows", "lengths"), ("cold_start", "ms")):
        report = make_report()
        for one in [report[part]] if part == "header" else report[part]:
            del one[key]
        report_file.write_text(json.dumps(report))
        failed = run("--from", str(report_file), "--plot", str(tmp_path / "figure.svg"))
        assert failed.exit_code == 1 and isinstance(failed.exception, SystemExit)
        assert str(report_file) in failed.output and repr(key) in failed.output


def test_a_cold_starts_steps_are_shown_in_the_order_in_which_they_happen(report_file: Path) -> None:
    report = make_report()
    steps = ("import", "manifest", "driver", "load", "first call", "total", "second call")
    report["cold_start"] = [{"by": "flashkda", "runs": 10, "at_once": None, "ms": {step: US for step in sorted(steps)}}]
    shown = lines(report)[-len(steps) :]
    assert [line.split("median")[0].strip() for line in shown] == list(steps)
    assert [step for step, _ in cold_steps(report["cold_start"])["flashkda"]] == list(steps[:5])


def test_a_report_replaces_another_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_report(make_report(), file)
    old = file.open()
    write_report(make_report() | {"rows": []}, file)
    # Who had opened the old one reads all of it.
    assert json.load(old) == make_report()
    assert load_report(file)["rows"] == []
    with pytest.raises(TypeError):
        write_report({"not": object()}, file)
    assert load_report(file)["rows"] == [] and list(tmp_path.iterdir()) == [file]


def test_a_report_goes_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "report.json")
    write_report(make_report(), link)
    assert link.is_symlink() and load_report(tmp_path / "there" / "report.json") == make_report()


def test_what_cannot_be_a_report_is_refused_by_name(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (pipe, tmp_path / "no folder" / "report.json"):
        with pytest.raises(FlashKDAError, match=file.name):
            write_report(make_report(), file)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--peer", "fla", "--no-peers"),
        ("--peer", "flashkda"),
        *(
            ("--from", "REPORT", *measuring)
            for measuring in (
                ("--json", "other.json"), ("--tokens", "8"), ("--heads", "1"), ("--quick",), ("--samples", "11"),
                ("--peer", "fla"), ("--no-peers",), ("--cold-start",), ("--processes", "10"), ("--at-once", "8"),
                ("--device", "0"),
            )
        ),
    ],
)  # fmt: skip
def test_options_that_contradict_are_refused(report_file: Path, arguments: tuple[str, ...]) -> None:
    failed = run(*(str(report_file) if word == "REPORT" else word for word in arguments))
    assert failed.exit_code == 2 and not Path("other.json").exists()
    assert arguments[2 if "--from" in arguments else 0] in failed.output


def test_showing_a_report_needs_no_torch(report_file: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from flashkda.cli import main\n"
        f"main(['bench', '--from', {str(report_file)!r}])"
    )
    folder = Path(__file__).parents[2] / "runtime"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Made-up GPU" in done.stdout


# --- figures -------------------------------------------------------------------------------------


def test_figures_take_the_automatic_choice_and_every_bv() -> None:
    rows = make_report()["rows"]
    assert speed_ups(rows, "flash_kda")["8192"] == [(6, 7.0), (24, pytest.approx(14 / 3)), (96, 2.0)]
    assert speed_ups(rows, "flash_kda")["8x1024"] == [(24, 3.0)]
    assert speed_ups(rows, "fla") == {"8x1024": [(24, 5.0)]}
    assert times_by_tokens(rows)["flashkda", 24] == [(4096, 300.0), (8192, 300.0)]
    assert times_by_tokens(rows)["flash_kda", 6] == [(4096, 1400.0), (8192, 1400.0)]
    assert times_by_bv(rows) == {
        None: [(6, 200.0), (24, 300.0), (96, 700.0)],
        32: [(6, 232.0), (24, 332.0), (96, 732.0)],
        64: [(6, 264.0), (24, 364.0), (96, 764.0)],
    }


def test_a_cold_starts_steps_end_at_the_first_result() -> None:
    assert cold_steps(make_report()["cold_start"]) == {
        "flashkda": [("import", 7.5), ("load", 8.0), ("first call", 25.5)],
        "fla": [("import", 3000.0), ("first call", 81000.0)],
    }


def test_a_cold_start_of_another_order_of_magnitude_does_not_flatten_the_rest() -> None:
    assert cold_axis_end([41.0, 120.0, 84000.0]) == 150.0
    assert cold_axis_end([84000.0]) == 105000.0


def drawn(figure: Path, *report_files: Path) -> set[str]:
    """Draw reports as SVG; its texts, which matplotlib leaves as comments beside their outlines."""
    sources = [word for file in report_files for word in ("--from", str(file))]
    result = run(*sources, "--plot", str(figure))
    assert result.exit_code == 0, result.output
    return {text.strip() for text in re.findall("<!-- (.*?) -->", figure.read_text())}


def test_a_report_is_drawn_again_without_a_gpu(report_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    texts = drawn(tmp_path / "figure.svg", report_file)
    assert texts >= {
        "flashkda 0.1.0 (0123456789ab) on Made-up GPU, driver 580.1, SM clock 1980 MHz",
        "Speed-up over flash_kda, both kernels", "T=8192", "T=8x1024",
        "Speed-up over fla (Triton), both kernels",
        "Both kernels, one sequence", "flashkda, H=24", "flash_kda, H=6", "chain floor",
        "Recurrence by BV, one sequence", "BV 64", "automatic",
        "Cold start: from a context to the first result, median ms", "flashkda (10 processes)", "load", "41 ms",
        "fla (1 process)", "import 3.0 s, first call 81.0 s (cut off here)",
    }  # fmt: skip


def test_processes_at_once_have_a_bar_of_their_own(report_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = with_at_once(make_report())
    assert list(cold_steps(report["cold_start"])) == ["flashkda", "flashkda, 8 at once", "fla"]
    report_file.write_text(json.dumps(report))
    texts = drawn(tmp_path / "figure.svg", report_file)
    assert texts >= {"flashkda (10 processes)", "flashkda, 8 at once", "fla (1 process)", "41 ms", "63 ms"}
    for row in report["cold_start"]:
        del row["at_once"]
    del report["cold_start"][1]
    report_file.write_text(json.dumps(report))
    older = drawn(tmp_path / "older.svg", report_file)
    assert older >= {"flashkda (10 processes)", "fla (1 process)", "41 ms"} and "flashkda, 8 at once" not in older


def test_figures_without_measurements_are_left_out(report_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report()
    report["rows"] = [row for row in report["rows"] if row["by"] != "fla"]
    report_file.write_text(json.dumps(report | {"cold_start": []}))
    texts = drawn(tmp_path / "figure.svg", report_file)
    assert "Speed-up over flash_kda, both kernels" in texts
    assert not any("Triton" in text or "Cold start" in text for text in texts)


def test_three_reports_make_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = make_report()
    apart = {
        "gpu": whole | {"rows": [row for row in whole["rows"] if row["by"] != "fla"], "cold_start": []},
        "gpu-fla": whole | {"rows": [row for row in whole["rows"] if row["by"] != "flash_kda"], "cold_start": []},
        "gpu-cold": whole | {"rows": [], "header": whole["header"] | {"commit": "ba9876543210"}},
    }
    files = []
    for name, report in apart.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(report))
    one = tmp_path / "one.json"
    one.write_text(json.dumps(whole))
    texts, texts_of_one = drawn(tmp_path / "three.svg", *files), drawn(tmp_path / "one.svg", one)
    assert texts_of_one <= texts
    assert texts - texts_of_one == {
        "flashkda 0.1.0 (ba9876543210) on Made-up GPU, driver 580.1, SM clock 1980 MHz",
    }  # fmt: skip


def test_no_two_lines_of_a_figure_look_alike() -> None:
    to_rgba = pytest.importorskip("matplotlib.colors").to_rgba
    report = make_report()
    for number in range(1, 13):
        for shape in (Shape((1024 * number,), 24), Shape((64, number), 24)):
            changes = {"shape": shape.label, "lengths": list(shape.lengths), "tokens": shape.tokens, "heads": 24}
            for by in ("flashkda", "flash_kda", "fla"):
                report["rows"].append(make_row(**changes, by=by))
    report["rows"] += [make_row(kernel="recurrence", bv=bv) for bv in range(1, 17)]
    panels = [axes for axes in make_figure([report]).axes if axes.lines]
    assert len(panels) == 4
    for axes in panels:
        looks = [
            (line.get_linestyle(), to_rgba(line.get_color())) for line in axes.lines
            if line.get_linestyle() != "None"
        ]  # fmt: skip
        assert len(set(looks)) == len(looks) >= 8


def test_legends_lie_outside_of_the_figures_they_explain(report_file: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = make_figure([load_report(report_file)])
    figure.draw_without_rendering()
    panels = [axes.get_window_extent() for axes in figure.axes]
    legends = [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_legend() is not None]
    assert len(legends) == 5
    assert not any(panel.overlaps(legend) for panel in panels for legend in legends)


def test_a_png_is_as_wide_as_a_readme_shows_it(report_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.png"
    assert run("--from", str(report_file), "--plot", str(figure)).exit_code == 0
    header = figure.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and struct.unpack(">I", header[16:20]) == (1600,)


def test_an_unwritable_plot_and_an_empty_report_are_no_traceback(report_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report()
    report_file.write_text(json.dumps(report | {"rows": [], "host": [], "cold_start": []}))
    assert run("--from", str(report_file), "--plot", str(tmp_path / "empty.png")).exit_code == 0
    failed = run("--from", str(report_file), "--plot", str(tmp_path / "figure.nonsense"))
    assert failed.exit_code == 1 and "figure.nonsense" in failed.output


def test_without_matplotlib_the_extra_is_named(
    report_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashkda.bench_plot.find_spec", lambda name: None)
    monkeypatch.setattr("flashkda.bench.measure", lambda *arguments: pytest.fail("something was measured"))
    for words in (("--from", str(report_file)), ("--tokens", "8")):
        failed = run(*words, "--plot", str(tmp_path / "figure.svg"))
        assert failed.exit_code == 1 and "flashkda[bench]" in failed.output
