"""`flashkda bench` from end to end on a made-up GPU: what it launches, compares and reports."""

import contextlib
import json
import os
import textwrap
from collections.abc import Callable, Iterator
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
from flashkda.bench_variants import own_variants, peer_variants  # noqa: E402
from flashkda.kernels import device_kernels  # noqa: E402

BVS = (32, 64, 128)


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
                workspace=zeros(13856 * 64 * shape.heads, dtype=torch.uint8),
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
    variants = own_variants(sets, device_kernels(0))
    assert [(one.kernel, one.bv, one.bv_used) for one in variants] == [
        ("prepare", None, None),
        *(("recurrence", bv, bv or 32) for bv in (None, *BVS)),
        *(("both", bv, bv or 32) for bv in (None, *BVS)),
    ]
    for one in variants:
        del cuda.launches[:]
        one.run(1)
        expected = {"prepare": ["prepare"], "recurrence": ["recurrence"], "both": ["prepare", "recurrence"]}[one.kernel]
        assert [launch.entry.split("_")[1] for launch in cuda.launches] == expected
        for launch in cuda.launches:
            assert launch.values["workspace"] == sets[1].workspace.data_ptr()
            assert launch.values["cu_seqlens"] == sets[1].cu_seqlens.data_ptr()


def test_a_kernel_alone_is_launched_as_the_whole_call_launches_it(gpu: Any, inputs: Any, cuda: Any) -> None:
    sets = inputs(Shape((40,), 2), None, None, 1)
    runs = {(one.kernel, one.bv): one.run for one in own_variants(sets, device_kernels(0))}
    runs["prepare", None](0)
    runs["recurrence", 64](0)
    runs["both", 64](0)
    alone, together = cuda.launches[:2], cuda.launches[2:]
    assert [launch.values for launch in alone] == [launch.values for launch in together]
    assert [launch.config["gridDimX"] for launch in alone] == [launch.config["gridDimX"] for launch in together]
    assert not hasattr(alone[1].config, "attrs") and "attrs" not in alone[1].config


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


def test_a_run_reports_every_variant_beside_the_original(original: None, tmp_path: Path) -> None:
    code, report = bench(tmp_path, "--tokens", "40", "--heads", "2", "--heads", "3")
    assert code == 0
    assert report["header"]["peers"] == {"flash_kda": "made up"}
    assert report["header"]["clock_mhz"] == 1500.0
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
    assert [row["call"] for row in report["host"]] == [
        "flashkda.fwd, workspace given", "flashkda.fwd, workspace allocated", "flash_kda",
    ]  # fmt: skip
    assert all(row["us"]["count"] >= 1000 for row in report["host"])


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
    monkeypatch.setattr(bench_cold, "find_spec", lambda name: None)
    (row,) = bench_cold.cold_rows(0, ("fla",))
    assert row["runs"] == 10
    assert {step: ms["median"] for step, ms in row["ms"].items()} == {
        "import": 5.0, "first call": 7.0, "second call": 1.0, "total": 12.0,
    }  # fmt: skip


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
