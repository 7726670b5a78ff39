"""`flashkda bench` from end to end on a made-up GPU: what it launches, compares and reports."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from flashkda.bench_device import open_clock
from flashkda.bench_peers import Absent, find_peer
from flashkda.bench_shapes import Shape
from flashkda.cli import main
from flashkda.driver import get_driver

torch = pytest.importorskip("torch")

from flashkda.bench_inputs import Inputs  # noqa: E402
from flashkda.bench_measure import Replayable, time_variants  # noqa: E402
from flashkda.bench_variants import lone_variants, own_variants, peer_variants  # noqa: E402
from flashkda.kernels import device_kernels  # noqa: E402

BVS = (16, 32, 64, 128)


@pytest.fixture
def inputs(on_cuda: Callable[..., Any]) -> Callable[..., list[Inputs]]:
    """Stands in for `make_inputs`: small tensors of zeros that claim to be on the device."""

    def make(shape: Shape, contract: object, device: object, copies: int) -> list[Inputs]:
        def zeros(*size: int, dtype: Any = torch.bfloat16) -> Any:
            return on_cuda(torch.zeros(size, dtype=dtype))

        rows, states = (1, shape.tokens, shape.heads, 128), (len(shape.lengths), shape.heads, 128, 128)
        cu_seqlens = on_cuda(torch.tensor((0, *shape.lengths)).cumsum(0)) if shape.packed else None
        return [
            Inputs(
                q=zeros(*rows), k=zeros(*rows), v=zeros(*rows), g=zeros(*rows), beta=zeros(*rows[:3]), out=zeros(*rows),
                A_log=zeros(shape.heads, dtype=torch.float32), dt_bias=zeros(shape.heads, 128, dtype=torch.float32),
                initial_state=zeros(*states), final_state=zeros(*states), cu_seqlens=cu_seqlens,
                workspace=zeros(13600 * 64 * shape.heads, dtype=torch.uint8),
            )
            for _ in range(copies)
        ]  # fmt: skip

    return make


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, inputs: Callable[..., Any], cuda: Any, artifact_folder: Path) -> Any:
    """torch.cuda made up: a graph's replay takes 100 us a captured launch; each launch runs at capture."""
    clock = SimpleNamespace(now=0.0, capturing=None)

    class Graph:
        launches = 0

        def capture_begin(self) -> None:
            self.before = len(cuda.launches) + clock.peer_calls

        def capture_end(self) -> None:
            self.launches = len(cuda.launches) + clock.peer_calls - self.before

        def replay(self) -> None:
            clock.now += 0.1 * self.launches

        def reset(self) -> None:
            pass

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    @contextlib.contextmanager
    def stream(which: object) -> Iterator[None]:
        yield

    clock.peer_calls = 0
    for name, value in {
        "CUDAGraph": Graph, "Event": Event, "stream": stream, "Stream": lambda device: SimpleNamespace(synchronize=int),
        "synchronize": lambda: None, "empty_cache": lambda: None, "set_device": lambda ordinal: None,
        "get_device_properties": lambda ordinal: SimpleNamespace(L2_cache_size=1 << 20),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    device_clock = SimpleNamespace(read=lambda: 1500.0, source="made up", nominal_mhz=1980.0, driver_release="580.1")
    monkeypatch.setattr("flashkda.bench_device.open_clock", lambda driver, ordinal: device_clock)
    monkeypatch.setattr("flashkda.bench_inputs.make_inputs", inputs)
    monkeypatch.setattr("flashkda.bench_host.make_inputs", inputs)
    cuda.contexts[:] = [100]
    return clock


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    """An importable flash_kda that does nothing but write NaN, as our kernels on the made-up GPU leave it."""
    package = tmp_path / "peers" / "flash_kda"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        textwrap.dedent("""
            __version__ = "made up"
            clock = None
            wrong = False
            def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
                    cu_seqlens=None):
                clock.peer_calls += 4
                if wrong:
                    out[0, 0, 0, 0] = 1.0
        """)
    )
    monkeypatch.syspath_prepend(str(package.parent))
    import flash_kda  # type: ignore[import-not-found]

    flash_kda.clock = gpu
    yield
    import sys

    del sys.modules["flash_kda"]


def bench(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["bench", "--json", str(file), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(file.read_text())


def test_each_kernel_alone_and_together_at_every_bv(gpu: Any, inputs: Any, cuda: Any) -> None:
    sets = inputs(Shape((40, 8), 2), None, None, 2)
    variants = own_variants(sets, device_kernels(0), None)
    assert [(one.kernel, one.bv, one.bv_used) for one in variants] == [
        ("prepare", None, None),
        *(("recurrence", bv, bv or 16) for bv in (None, *BVS)),
        *(("both", bv, bv or 16) for bv in (None, *BVS)),
    ]
    for one in variants:
        del cuda.launches[:]
        one.run(1)
        expected = {"prepare": ["prepare"], "recurrence": ["recurrence"], "both": ["prepare", "recurrence"]}[one.kernel]
        assert [launch.entry.split("_")[1] for launch in cuda.launches] == expected
        assert all(launch.values["cu_seqlens"] == sets[1].cu_seqlens.data_ptr() for launch in cuda.launches)


def assert_records_in_order(launches: list[Any]) -> None:
    """Whatever reads a workspace finds records of its own order there."""
    written = {}
    for launch in launches:
        variant, workspace = launch.entry.removeprefix("entry_"), launch.values["workspace"]
        order = {"prepare_a": "a", "prepare_b": "b", "recurrence_bv16": "a"}.get(variant, "b")
        if variant.startswith("prepare"):
            written[workspace] = order
        assert written[workspace] == order, variant


@pytest.mark.parametrize(("heads", "order"), [(2, "a"), (20, "b")])
def test_each_order_of_the_records_has_workspaces_of_its_own(
    gpu: Any, inputs: Any, cuda: Any, heads: int, order: str
) -> None:
    sets = inputs(Shape((40,), heads), None, None, 2)
    variants = own_variants(sets, device_kernels(0), 32)
    made = list(cuda.launches)
    assert [launch.entry for launch in made[:2]] == [f"entry_prepare_{order}"] * 2
    assert [launch.values["workspace"] for launch in made[:2]] == [one.workspace.data_ptr() for one in sets]
    assert len({launch.values["workspace"] for launch in made}) == len(made) == 4
    for one in (*variants, *reversed(variants)):
        one.run(0)
        one.run(1)
    assert_records_in_order(cuda.launches)
    assert {launch.values["workspace"] for launch in cuda.launches} == {one.values["workspace"] for one in made}


@pytest.mark.parametrize(("choices", "orders"), [((64, 16), "ba"), ((128, 32), "b"), ((16,), "a"), ((None, 32), "ab")])
def test_the_first_bv_decides_which_prepare_is_timed(
    gpu: Any, inputs: Any, cuda: Any, choices: tuple[int | None, ...], orders: str
) -> None:
    prepare, *recurrences = lone_variants(inputs(Shape((40,), 2), None, None, 1), device_kernels(0), choices)
    assert [launch.entry for launch in cuda.launches] == [f"entry_prepare_{order}" for order in orders]
    for one in (*recurrences, prepare):
        one.run(0)
    assert cuda.launches[-1].entry == f"entry_prepare_{orders[0]}"
    assert_records_in_order(cuda.launches)


def test_a_kernel_alone_is_launched_as_the_whole_call_launches_it(gpu: Any, inputs: Any, cuda: Any) -> None:
    sets = inputs(Shape((40,), 2), None, None, 1)
    runs = {(one.kernel, one.bv): one.run for one in own_variants(sets, device_kernels(0), None)}
    del cuda.launches[:]
    runs["prepare", None](0)
    runs["recurrence", None](0)
    runs["both", None](0)
    alone, together = cuda.launches[:2], cuda.launches[2:]
    assert [launch.values for launch in alone] == [launch.values for launch in together]
    assert [launch.config["gridDimX"] for launch in alone] == [launch.config["gridDimX"] for launch in together]


def test_checkpoints_are_written_by_one_more_variant(gpu: Any, inputs: Any, cuda: Any) -> None:
    sets = inputs(Shape((40,), 2), None, None, 2)
    plain, one = (own_variants(sets, device_kernels(0), every)[-1] for every in (None, 32))
    assert plain.checkpoint_every is None
    assert (one.kernel, one.bv, one.bv_used, one.checkpoint_every) == ("both", None, 16, 32)
    written = []
    for index, own in enumerate(sets):
        del cuda.launches[:]
        one.run(index)
        _, recurrence = cuda.launches
        assert recurrence.values["workspace"] == own.workspace.data_ptr()
        assert recurrence.values["final_state"] == own.final_state.data_ptr()
        assert (recurrence.values["checkpoint_chunks"], recurrence.values["num_checkpoints"]) == (2, 2)
        written.append(recurrence.values["checkpoints"])
    assert len({0, *written}) == 3


def test_variants_are_timed_in_rotating_order(gpu: Any) -> None:
    order: list[int] = []

    def graph(index: int) -> Any:
        def replay() -> None:
            order.append(index)
            gpu.now += index + 1

        return SimpleNamespace(replay=replay)

    replayables = [Replayable(graph(index), 2) for index in range(3)]
    timed = time_variants(replayables, 3, SimpleNamespace(synchronize=lambda: None), lambda: order.append(-1))
    # The first of each round is only there to keep the GPU busy.
    assert order == [2, 0, 1, 2, -1, 2, 1, 0, 2, -1, 1, 2, 0, 1, -1]
    assert [one.summary.median for one in timed] == [500.0, 1000.0, 1500.0]


def test_a_run_reports_every_variant_beside_the_original(original: None, tmp_path: Path, cuda: Any) -> None:
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2", "--heads", "3")
    assert code == 0
    assert_records_in_order(cuda.launches)
    assert report["header"]["peers"] == {"flash_kda": "made up"}
    assert report["header"]["clock_mhz"] == 1500.0
    assert report["header"]["complete"] is True
    rows = [row for row in report["rows"] if row["heads"] == 2]
    assert [(row["by"], row["kernel"]) for row in rows[-1:]] == [("flash_kda", "both")]
    assert rows[-1]["bits"] == "reference" and rows[-1]["us"]["median"] == pytest.approx(400)
    both = [row for row in rows if row["by"] == "flashkda" and row["kernel"] == "both"]
    assert [row["bv"] for row in both] == [None, *BVS]
    for row in both:
        assert row["bits"] == "equal"
        assert row["us"]["count"] == 11
        assert row["us"]["median"] == pytest.approx(200)
        assert row["speed_up"] == pytest.approx(2)
    alone = next(row for row in rows if row["kernel"] == "recurrence")
    assert alone["cycles_per_chunk"] == pytest.approx(100 * 1500 / 3)
    assert alone["calls_a_sample"] % alone["copies"] == 0 and alone["calls_a_sample"] * 100 >= 200
    assert all(row["checkpoint_every"] is None for row in report["rows"])
    assert [row["call"] for row in report["host"]] == [
        "flashkda.fwd, workspace given", "flashkda.fwd, workspace allocated",
        "flashkda.fwd, other buffers at each call", "flash_kda",
    ]  # fmt: skip
    assert all(row["us"]["count"] >= 1000 for row in report["host"])


def test_a_run_reports_checkpoints_beside_the_plain_call(
    original: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashkda.bench_shapes.CHECKPOINTED", (Shape((40,), 2),))
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2", "--heads", "3")
    assert code == 0
    (row,) = (row for row in report["rows"] if row["checkpoint_every"] is not None)
    assert (row["heads"], row["by"], row["kernel"], row["checkpoint_every"]) == (2, "flashkda", "both", 64)
    # The original has no such call.
    assert row["bits"] == "equal" and row["speed_up"] is None
    plain = next(one for one in report["rows"] if one["heads"] == 2 and one["kernel"] == "both")
    assert row["bv_used"] == plain["bv_used"] and row["gb_per_s"] > plain["gb_per_s"]


def test_other_buffers_at_each_call_are_examined_at_each_call(
    gpu: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda.arguments import ALL_TENSORS
    from flashkda.bench_host import host_rows
    from flashkda.call import KEPT_ADDRESSES, Call

    examined: Counter[int] = Counter()
    real = Call._examine

    def examine(self: Call, tensors: Any, addresses: tuple[int, ...]) -> None:
        examined[addresses[ALL_TENSORS.index("out")]] += 1
        real(self, tensors, addresses)

    monkeypatch.setattr(Call, "_examine", examine)
    host_rows(device_kernels(0).manifest.contract, torch.device("cuda", 0), (), lambda line: None)
    outs = Counter(launch.values["out"] for launch in cuda.launches if "recurrence" in launch.entry)
    ((same, calls), *others) = outs.most_common()
    assert len(others) > KEPT_ADDRESSES
    # Two rows call with the same buffers, a third one as often with the others in turn.
    assert calls == 2 * sum(count for _, count in others)
    assert {out: examined[out] for out, _ in others} == dict(others)
    assert examined[same] < calls / 50


def test_a_peer_that_breaks_is_left_out_of_the_hosts_time(
    original: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flash_kda

    real = flash_kda.fwd

    def fwd(q: Any, *arguments: Any, **named: Any) -> None:
        if q.shape[1] == 256:
            raise ValueError("not so many")
        real(q, *arguments, **named)

    monkeypatch.setattr(flash_kda, "fwd", fwd)
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2")
    assert code == 0
    assert "flash_kda" in {row["by"] for row in report["rows"]}
    assert "flash_kda" not in {row["call"] for row in report["host"]}


@pytest.mark.parametrize(
    ("named", "measured"),
    [
        ((), {"flash_kda"}),
        (("--no-peers",), set()),
        (("--peer", "fla"), {"fla"}),
        (("--peer", "fla", "--peer", "flash_kda", "--peer", "fla"), {"fla", "flash_kda"}),
    ],
)
def test_named_peers_replace_the_usual_one(
    original: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...], measured: set[str]
) -> None:
    stand_in = find_peer("flash_kda")
    assert not isinstance(stand_in, Absent)
    monkeypatch.setattr("flashkda.bench.find_peer", lambda name: replace(stand_in, name=name))
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2", *named)
    assert code == 0
    by = [row["by"] for row in report["rows"] if row["by"] != "flashkda"]
    assert sorted(by) == sorted(measured) == sorted(report["header"]["peers"])
    assert report["header"]["left_out"] == {}


@pytest.mark.parametrize("mode", [("--tokens", "40"), ("--cold-start",)])
def test_a_named_peer_that_is_absent_fails_before_anything_is_measured(
    gpu: Any, cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    monkeypatch.setattr("flashkda.bench_peers.find_spec", lambda name: None)
    monkeypatch.setattr("flashkda.bench_cold.find_spec", lambda name: None)
    monkeypatch.setattr("flashkda.bench_cold.run_child", lambda by, device: pytest.fail("a process was started"))
    file = tmp_path / "report.json"
    failed = CliRunner().invoke(main, ["bench", "--peer", "fla", "--json", str(file), *mode])
    assert failed.exit_code == 1 and "no peer fla: not installed" in failed.output
    assert cuda.launches == [] and not file.exists()


def test_the_usual_peer_may_be_absent(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashkda.bench_peers.find_spec", lambda name: None)
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2")
    assert code == 0 and report["header"]["left_out"] == {"flash_kda": "not installed"}


def test_a_run_that_is_stopped_keeps_what_it_measured(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import bench as module

    real, kept = module._Bench.measure_shape, []
    file = tmp_path / "report.json"

    def measure_shape(self: Any, shape: Shape, *arguments: Any) -> Any:
        kept.append(json.loads(file.read_text()))
        if shape.heads == 4:
            raise KeyboardInterrupt
        return real(self, shape, *arguments)

    monkeypatch.setattr(module._Bench, "measure_shape", measure_shape)
    words = ["--tokens", "40", "--heads", "2", "--heads", "3", "--heads", "4", "--no-peers", "--json", str(file)]
    stopped = CliRunner().invoke(main, ["bench", *words])
    assert stopped.exit_code == 1
    assert [report["header"]["progress"] for report in kept] == ["0 of 3 shapes", "1 of 3 shapes", "2 of 3 shapes"]
    assert not any(report["header"]["complete"] for report in kept)
    assert [{row["heads"] for row in report["rows"]} for report in kept] == [set(), {2}, {2, 3}]
    shown = CliRunner().invoke(main, ["bench", "--from", str(file)])
    assert shown.exit_code == 0 and "stopped after 2 of 3 shapes" in shown.output and "T=40 H=3" in shown.output


def test_a_run_says_how_much_there_is_and_how_long_each_shape_took(gpu: Any, tmp_path: Path) -> None:
    words = ["--tokens", "40", "--heads", "2", "--heads", "3", "--no-peers"]
    told = CliRunner().invoke(main, ["bench", *words]).stderr.splitlines()
    assert told[0].startswith("2 shapes: on an H200 about 1 s")
    assert told[2] == "1 of 2: T=40 H=2" and told[4] == "2 of 2: T=40 H=3"
    for line in (told[3], told[5]):
        assert re.fullmatch(r"  \d+\.\d s, \d+ s so far", line)


def test_bits_that_differ_from_the_originals_fail_the_run(original: None, tmp_path: Path) -> None:
    import flash_kda

    flash_kda.wrong = True
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2")
    assert code == 1
    assert {row["bits"] for row in report["rows"] if row["by"] == "flashkda" and row["kernel"] == "both"} == {"differ"}


def test_a_peer_that_breaks_is_left_out_of_its_shape(
    original: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flash_kda

    real = flash_kda.fwd

    def fwd(q: Any, *arguments: Any, **named: Any) -> None:
        if q.shape[2] == 3:
            raise ValueError("not three")
        real(q, *arguments, **named)

    monkeypatch.setattr(flash_kda, "fwd", fwd)
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2", "--heads", "3")
    assert code == 0
    assert {(row["heads"], row["by"]) for row in report["rows"]} == {(2, "flashkda"), (2, "flash_kda"), (3, "flashkda")}
    assert {row["bits"] for row in report["rows"] if row["heads"] == 3} == {None, "reference", "equal"}


def test_kernels_that_a_local_build_offers_are_timed_alone(original: None, inputs: Any) -> None:
    import flash_kda

    ran: list[tuple[str, float]] = []

    def kernels(q: Any, *arguments: Any, **named: Any) -> dict[str, Callable[[], None]]:
        return {name: lambda name=name: ran.append((name, q.data_ptr())) for name in ("prepare", "recurrence")}

    flash_kda.kernels = kernels
    peer = find_peer("flash_kda")
    assert not isinstance(peer, Absent)
    sets = inputs(Shape((40,), 2), None, None, 2)
    runs = {one.kernel: one.run for one in peer_variants(sets, peer)}
    assert list(runs) == ["both", "prepare", "recurrence"]
    runs["recurrence"](1)
    assert ran == [("recurrence", sets[1].q.data_ptr())]


def test_our_own_alias_is_no_peer(original: None) -> None:
    import flash_kda

    import flashkda

    flash_kda.fwd = flashkda.fwd
    peer = find_peer("flash_kda")
    assert isinstance(peer, Absent) and "another name" in peer.reason


def test_a_peer_that_cannot_be_imported_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fla.py").write_text("raise OSError('no such compiler')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLA_FLASH_KDA", os.environ.get("FLA_FLASH_KDA", "1"))
    assert find_peer("fla") == Absent("fla", "cannot be imported: OSError: no such compiler")
    monkeypatch.setattr("flashkda.bench_peers.find_spec", lambda name: None)
    assert find_peer("flash_kda") == Absent("flash_kda", "not installed")


def test_without_torch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashkda.bench.find_spec", lambda name: None)
    failed = CliRunner().invoke(main, ["bench", "--quick"])
    assert failed.exit_code == 1 and "pip install torch" in failed.output


def test_a_cold_start_that_fails_says_what_the_process_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkda.bench_cold import run_child
    from flashkda.errors import FlashKDAError

    (tmp_path / "torch.py").write_text("raise SystemExit('no torch in the child')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FlashKDAError, match="no torch in the child"):
        run_child("flashkda", 0)


def test_a_cold_start_reports_each_step_and_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkda import bench_cold

    monkeypatch.setattr(
        bench_cold, "run_child", lambda by, device: {"import": 5.0, "first call": 7.0, "second call": 1.0}
    )
    starts = bench_cold.ColdStarts(0, 3, 0, ())
    assert list(starts.run(lambda line: None)) == [f"{done} of 3 processes" for done in (1, 2, 3)]
    (row,) = starts.rows()
    assert (row["runs"], row["at_once"]) == (3, None)
    assert {step: ms["median"] for step, ms in row["ms"].items()} == {
        "import": 5.0, "first call": 7.0, "second call": 1.0, "total": 12.0,
    }  # fmt: skip


def test_a_slow_peers_cold_start_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkda import bench_cold

    ran: list[str] = []

    def run_child(by: str, device: int) -> dict[str, float]:
        ran.append(by)
        return {"import": 4000.0, "first call": 80000.0, "second call": 1.0}

    monkeypatch.setattr(bench_cold, "run_child", run_child)
    monkeypatch.setattr(bench_cold, "find_spec", lambda name: object())
    starts = bench_cold.ColdStarts(0, 4, 0, ("fla",))
    assert len(list(starts.run(lambda line: None))) == 5
    assert ran == ["flashkda"] * 4 + ["fla"]
    _, row = starts.rows()
    assert (row["by"], row["runs"], row["ms"]["total"]["median"], starts.left_out) == ("fla", 1, 84000.0, {})


@pytest.fixture
def torch_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module path of fresh processes, with a torch whose functions return nothing of use."""
    (tmp_path / "torch.py").write_text(
        textwrap.dedent("""
            import sys
            from unittest.mock import MagicMock
            sys.modules["torch"] = torch = MagicMock()
            torch.randn.return_value.bfloat16.return_value.unbind.return_value = range(5)
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def write_fla(folder: Path, text: str) -> None:
    (folder / "fla" / "ops").mkdir(parents=True)
    (folder / "fla" / "ops" / "kda.py").write_text(textwrap.dedent(text))


def test_the_cold_start_of_fla_is_that_of_its_own_kernels(
    torch_of_nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda.bench_cold import run_child

    write_fla(
        torch_of_nothing,
        """
        import os
        def chunk_kda(*arguments, **named):
            assert os.environ["FLA_FLASH_KDA"] == "0"
            assert not os.listdir(os.environ["TRITON_CACHE_DIR"])
        """,
    )
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    assert list(run_child("fla", 0)) == ["import", "first call", "second call"]


def test_a_peer_whose_process_fails_is_left_out_with_the_reason(
    torch_of_nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import bench_cold

    write_fla(torch_of_nothing, "raise OSError('no such compiler')")
    real = bench_cold.run_child
    monkeypatch.setattr(
        bench_cold, "run_child", lambda by, device: real(by, device) if by == "fla" else {"import": 5.0}
    )
    monkeypatch.setattr(bench_cold, "find_spec", lambda name: object())
    starts = bench_cold.ColdStarts(0, 2, 0, ("fla",))
    assert list(starts.run(lambda line: None)) == ["1 of 3 processes", "2 of 3 processes"]
    assert [row["by"] for row in starts.rows()] == ["flashkda"]
    assert starts.left_out == {"fla": "OSError: no such compiler"}


def test_a_process_that_takes_too_long_is_ended(torch_of_nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkda import bench_cold
    from flashkda.errors import FlashKDAError

    write_fla(torch_of_nothing, "import time; time.sleep(60)")
    monkeypatch.setattr(bench_cold, "_TIMEOUT_S", 1)
    with pytest.raises(FlashKDAError, match="cold start of fla took longer than 1 s"):
        bench_cold.run_child("fla", 0)


def test_a_report_of_cold_starts_says_which_peers_are_left_out(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import bench_cold

    steps = {"import": 5.0, "second call": 1.0}
    monkeypatch.setattr(bench_cold, "run_child", lambda by, device: steps)
    monkeypatch.setattr(bench_cold, "run_at_once", lambda count, device: [steps] * count)
    monkeypatch.setattr("flashkda.bench_peers.find_spec", lambda name: None)
    code, report = bench(tmp_path, "--cold-start")
    assert code == 0
    assert [(row["by"], row["runs"], row["at_once"]) for row in report["cold_start"]] == [
        ("flashkda", 10, None), ("flashkda", 8, 8),
    ]  # fmt: skip
    assert report["header"]["left_out"] == {"flash_kda": "not installed"} and report["header"]["complete"]


def test_cold_starts_that_are_stopped_are_kept(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkda import bench_cold

    ran: list[str] = []

    def run_child(by: str, device: int) -> dict[str, float]:
        ran.append(by)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return {"import": 5.0, "second call": 1.0}

    monkeypatch.setattr(bench_cold, "run_child", run_child)
    file = tmp_path / "report.json"
    words = ["--cold-start", "--processes", "4", "--no-peers", "--json", str(file)]
    assert CliRunner().invoke(main, ["bench", *words]).exit_code == 1
    report = json.loads(file.read_text())
    assert (report["header"]["complete"], report["header"]["progress"]) == (False, "2 of 12 processes")
    assert [(row["by"], row["runs"]) for row in report["cold_start"]] == [("flashkda", 2)]


def test_processes_at_once_come_after_the_single_ones_and_before_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkda import bench_cold

    ran: list[Any] = []

    def run_child(by: str, device: int) -> dict[str, float]:
        ran.append((by, device))
        return {"import": 5.0, "first call": 7.0, "second call": 1.0}

    def run_at_once(count: int, device: int) -> list[dict[str, float]]:
        ran.append((count, device))
        return [{"import": 5.0 + number, "first call": 7.0, "second call": 1.0} for number in range(count)]

    monkeypatch.setattr(bench_cold, "run_child", run_child)
    monkeypatch.setattr(bench_cold, "run_at_once", run_at_once)
    monkeypatch.setattr(bench_cold, "find_spec", lambda name: object())
    told: list[str] = []
    starts = bench_cold.ColdStarts(1, 2, 3, ("fla",))
    assert list(starts.run(told.append)) == [f"{done} of 6 processes" for done in (1, 2, 5, 6)]
    assert ran == [("flashkda", 1), ("flashkda", 1), (3, 1), ("fla", 1)]
    assert told[0] == "6 fresh processes, 3 of them at once" and told[3].startswith("5 of 6: flashkda, 3 at once, ")
    alone, at_once, peer = starts.rows()
    assert list(alone) == list(at_once) and list(alone["ms"]) == list(at_once["ms"])
    assert [(row["by"], row["at_once"], row["runs"]) for row in (alone, at_once, peer)] == [
        ("flashkda", None, 2), ("flashkda", 3, 3), ("fla", None, 1),
    ]  # fmt: skip
    assert [at_once["ms"]["total"][key] for key in ("count", "least", "median", "most")] == [3, 12.0, 13.0, 14.0]


@pytest.fixture
def flashkda_of_nothing(torch_of_nothing: Path) -> Path:
    """A flashkda beside that torch; in the file "log" the one says when its import begins, the other when it is ready.

    Of all processes the first to be ready is so half a second before the others.
    """
    log = torch_of_nothing / "log"
    with (torch_of_nothing / "torch.py").open("a") as file:
        file.write(
            textwrap.dedent(f"""
                import os, time
                def say(word):
                    with open({str(log)!r}, "ab", buffering=0) as file:
                        file.write(word + b"\\n")
                def synchronize():
                    torch.cuda.synchronize.side_effect = None
                    try:
                        os.close(os.open({str(log)!r} + ".first", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        time.sleep(0.5)
                    say(b"ready")
                torch.cuda.synchronize.side_effect = synchronize
                torch.say = say
            """)
        )
    (torch_of_nothing / "flashkda.py").write_text(
        textwrap.dedent("""
            import sys
            from unittest.mock import MagicMock
            sys.modules["torch"].say(b"begun")
            sys.modules["flashkda"] = made_up = MagicMock()
            for name in ("artifacts", "driver", "kernels"):
                sys.modules[f"flashkda.{name}"] = getattr(made_up, name)
            made_up.kernels.device_kernels.return_value.variants.recurrence = {16: None}
        """)
    )
    return torch_of_nothing


def test_cold_starts_at_once_begin_when_all_have_a_context(flashkda_of_nothing: Path) -> None:
    from flashkda.bench_cold import run_at_once, run_child

    before = sorted(file.name for file in flashkda_of_nothing.iterdir())
    measured = run_at_once(4, 0)
    assert (flashkda_of_nothing / "log").read_text().split() == ["ready"] * 4 + ["begun"] * 4
    alone = run_child("flashkda", 0)
    steps = ["import", "manifest", "driver", "load", "first call", "second call"]
    assert [list(one) for one in measured] == [steps] * 4 == [list(alone)] * 4
    assert all(sum(one.values()) < 450 for one in measured), "waiting for others was measured"
    after = {file.name for file in flashkda_of_nothing.iterdir()}
    assert after - {*before, "__pycache__"} == {"log", "log.first"}


def test_cold_starts_at_once_fail_with_what_one_of_them_said(flashkda_of_nothing: Path) -> None:
    from flashkda.bench_cold import run_at_once
    from flashkda.errors import FlashKDAError

    with (flashkda_of_nothing / "flashkda.py").open("a") as file:
        file.write("raise OSError('no such kernels')\n")
    with pytest.raises(
        FlashKDAError, match=r"flashkda, 3 at once: process \d failed with code 1: (.|\n)*no such kernels"
    ):
        run_at_once(3, 0)


def test_cold_starts_at_once_that_take_too_long_are_named(
    flashkda_of_nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import bench_cold
    from flashkda.errors import FlashKDAError

    with (flashkda_of_nothing / "flashkda.py").open("a") as file:
        file.write("import time; time.sleep(60)\n")
    monkeypatch.setattr(bench_cold, "_TIMEOUT_S", 3)
    with pytest.raises(FlashKDAError, match="2 at once, took longer than 3 s: processes 1, 2 of 2 without a result"):
        bench_cold.run_at_once(2, 0)


def test_cold_starts_at_once_that_fail_end_the_run_and_keep_what_is_measured(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import bench_cold
    from flashkda.errors import FlashKDAError

    def run_at_once(count: int, device: int) -> list[dict[str, float]]:
        raise FlashKDAError("no memory for so many")

    monkeypatch.setattr(bench_cold, "run_child", lambda by, device: {"import": 5.0, "second call": 1.0})
    monkeypatch.setattr(bench_cold, "run_at_once", run_at_once)
    file = tmp_path / "report.json"
    words = ["--cold-start", "--processes", "2", "--at-once", "64", "--no-peers", "--json", str(file)]
    failed = CliRunner().invoke(main, ["bench", *words])
    assert failed.exit_code == 1 and "no memory for so many" in failed.output
    report = json.loads(file.read_text())
    assert report["header"]["progress"] == "2 of 66 processes"
    assert [(row["runs"], row["at_once"]) for row in report["cold_start"]] == [(2, None)]


@pytest.fixture
def clocked(cuda: Any) -> Any:
    """The made-up driver with what the clock asks it for."""
    cuda.devices[0]["clock_rate"] = 1_980_000
    cuda.CUdevice_attribute = SimpleNamespace(
        **vars(cuda.CUdevice_attribute), CU_DEVICE_ATTRIBUTE_CLOCK_RATE="clock_rate"
    )
    cuda.cuDeviceGetPCIBusId = lambda length, device: (0, b"0000:1A:00.0\0\0")
    return cuda


def test_the_clock_is_read_from_nvml_for_the_device_asked_for(clocked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def handle(bus: bytes, found: Any) -> int:
        asked.append(bus)
        found._obj.value = 42
        return 0

    def clock_info(device: Any, domain: int, value: Any) -> int:
        assert device.value == 42
        value._obj.value = {1: 1755}[domain]
        return 0

    def release(buffer: Any, size: int) -> int:
        buffer.value = b"580.1"
        return 0

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByPciBusId_v2=handle, nvmlSystemGetDriverVersion=release,
        nvmlDeviceGetClockInfo=clock_info,
    )  # fmt: skip
    monkeypatch.setattr("flashkda.bench_device.ctypes.CDLL", lambda name: nvml)
    clock = open_clock(get_driver(), 0)
    assert asked == [b"0000:1A:00.0"]
    assert (clock.read(), clock.nominal_mhz, clock.driver_release) == (1755.0, 1980.0, "580.1")


def test_without_nvml_the_nominal_clock_is_reported_as_such(clocked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("flashkda.bench_device.ctypes.CDLL", missing)
    clock = open_clock(get_driver(), 0)
    assert clock.read() == 1980.0
    assert "nominal" in clock.source and clock.driver_release is None


# --- tests/gpu/compare_builds.py -----------------------------------------------------------------


@pytest.fixture
def compare(gpu: Any, inputs: Any, artifact_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with `run` for it on two copies of the made-up build; -> click's result."""
    file = Path(__file__).parents[1] / "gpu" / "compare_builds.py"
    spec = importlib.util.spec_from_file_location("compare_builds", file)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "make_inputs", inputs)
    again = artifact_folder.parent / "again"
    shutil.copytree(artifact_folder, again)
    arguments = [str(artifact_folder), str(again), "--shape", "16@2", "--shape", "2x16@1"]
    return SimpleNamespace(script=script, run=lambda: CliRunner().invoke(script.main, arguments))


def test_builds_are_compared_shape_by_shape(compare: Any, artifact_folder: Path, cuda: Any) -> None:
    result = compare.run()
    assert result.exit_code == 0, result.output
    assert_records_in_order(cuda.launches)
    first, *builds = result.output.splitlines()[:3]
    assert first == "16@2" and "2x16@1" in result.output
    assert {line.split()[0] for line in builds} == {artifact_folder.name, "again"}
    assert all(
        line.split()[1:] == ["prepare", "100.0", *(word for bv in BVS for word in (str(bv), "100.0"))]
        for line in builds
    )


def test_a_build_with_other_bits_ends_in_exit_code_1(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.script, "same_bits", lambda a, b: False)
    result = compare.run()
    assert result.exit_code == 1
    assert "16@2: again at BV 16 differs from" in result.output
