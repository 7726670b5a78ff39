"""`flashkda demo` on a made-up GPU: what it launches, and that it says "equal" only of equal bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import flashkda
from flashkda.cli import main

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def gpu(on_cuda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cuda: Any, artifact_folder: Path) -> Any:
    """Everything that the demo makes claims to be on the device; what no kernel has written is zero."""

    def claiming(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, device: Any = None, **options: Any) -> Any:
            if device is None:
                return make(*arguments, **options)
            return on_cuda(make(*arguments, **options), torch.device(device).index)

        return made

    for name in ("full", "ones", "rand", "randn", "zeros"):
        monkeypatch.setattr(torch, name, claiming(getattr(torch, name)))
    monkeypatch.setattr(torch, "empty", claiming(torch.zeros))
    monkeypatch.setattr("flashkda.demo._HIDDEN", 16)
    return cuda


def running_sum(q: Any, k: Any, v: Any, g: Any, beta: Any, *arguments: Any, **named: Any) -> None:
    """Stands in for `flashkda.fwd`: out is the sum of v's first channel up to its token, mod 64; so is the state."""
    out, pool, resumed = arguments[1], named["initial_state"], named["has_initial_state"]
    assert named["final_state"] is pool
    for sequence, slot in enumerate(named["state_indices"].tolist()):
        before = pool[slot, 0, 0, 0].float() if resumed[sequence] else torch.zeros(())
        sums = (before + v[sequence, :, 0, 0].float().round().cumsum(0)) % 64
        out[sequence] = sums[:, None, None]
        pool[slot] = sums[-1]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", *arguments])


def test_the_prompt_is_one_call_and_then_pieces_of_it(gpu: Any) -> None:
    # No kernel writes anything here, and the two pools keep what they were filled with.
    assert run("--tokens", "100", "--piece", "32").exit_code == 1
    launched = [launch.entry.split("_")[1] for launch in gpu.launches]
    assert launched == ["prepare", "recurrence"] * 5
    values = [launch.values for launch in gpu.launches[1::2]]
    assert [one["seqlen"] for one in values] == [100, 32, 32, 32, 4]
    width = 5 * 8 * 128 + 8
    assert {one["v_stride_t"] for one in values} == {width}
    first = values[1]["v"]
    assert [one["v"] - first for one in values] == [0, *(start * width * 2 for start in (0, 32, 64, 96))]
    pools = [one["initial_state"] for one in values]
    assert pools == [one["final_state"] for one in values]
    assert len(set(pools)) == 2 and len(set(pools[1:])) == 1
    assert {one["num_slots"] for one in values} == {8} and 0 not in {one["state_indices"] for one in values}
    resumed = [one["has_initial_state"] for one in values]
    assert resumed[0] == resumed[1] and len(set(resumed[2:])) == 1 and len({0, *resumed}) == 3


def test_equal_pieces_are_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashkda, "fwd", running_sum)
    shown = run("--tokens", "100", "--piece", "48")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["0..47", "zero", "equal"],
        ["48..95", "its", "slot", "equal"],
        ["96..99", "its", "slot", "equal"],
        ["final", "state", "equal"],
    ]
    assert lines[-2] == "The layer's output: bfloat16 [1, 100, 16]"
    assert lines[-1].startswith("3 pieces and one call: equal")


def test_a_state_that_does_not_go_on_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*arguments: Any, **named: Any) -> None:
        running_sum(*arguments, **named | {"has_initial_state": torch.tensor([False])})

    monkeypatch.setattr(flashkda, "fwd", forgetful)
    shown = run("--tokens", "100", "--piece", "48")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert [line.split()[-1] for line in lines[2:6]] == ["equal", "DIFFERENT", "DIFFERENT", "DIFFERENT"]
    assert "DIFFERENT" in lines[-1]


def test_a_slot_that_is_not_passed_over_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*arguments: Any, **named: Any) -> None:
        running_sum(*arguments, **named | {"has_initial_state": torch.tensor([True])})

    monkeypatch.setattr(flashkda, "fwd", reading)
    assert run("--tokens", "100", "--piece", "48").exit_code == 1


def test_one_bit_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def minus_zero(*arguments: Any, **named: Any) -> None:
        out = arguments[6]
        if out.shape[1] == 4:
            out[0, -1, -1, -1] = -0.0

    monkeypatch.setattr(flashkda, "fwd", minus_zero)
    shown = run("--tokens", "100", "--piece", "48")
    assert shown.exit_code == 1
    assert [line.split()[-1] for line in shown.stdout.splitlines()[2:5]] == ["equal", "equal", "DIFFERENT"]


@pytest.mark.parametrize("piece", ["0", "24"])
def test_a_piece_that_ends_inside_a_chunk_is_refused(piece: str, gpu: Any) -> None:
    refused = run("--piece", piece)
    assert refused.exit_code == 2 and "--piece" in refused.output
    assert not gpu.launches


def test_without_a_device_it_says_why(gpu: Any) -> None:
    gpu.devices = []
    failed = run()
    assert failed.exit_code == 1 and "0 visible CUDA devices" in failed.output
