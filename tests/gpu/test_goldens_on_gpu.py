"""All goldens, every BV, twice."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashkda.goldens.cases import CASES, Case  # noqa: E402
from flashkda.goldens.digests import load_digests  # noqa: E402
from flashkda.goldens.run import device_inputs, float64_errors, leaks, run_case, wrong_digests  # noqa: E402
from flashkda.selftest import RECORDED_ON, run  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_bits(case: Case, device, record, all_bv) -> None:
    tensors = device_inputs(case, device)
    first = run_case(case, tensors, record, all_bv[0])
    if "{}.{}".format(*torch.cuda.get_device_capability(device)) == RECORDED_ON:
        assert wrong_digests(case, first, load_digests()[case.name]) == []
    for bv in (*all_bv, *all_bv):
        assert first.same_bits(run_case(case, tensors, record, bv)), f"bv={bv}"


@pytest.mark.parametrize("case", [case for case in CASES if case.poison], ids=lambda case: case.name)
def test_golden_poison_is_contained(case: Case, device, record, all_bv) -> None:
    clean = case.without_poison()
    for bv in all_bv:
        poisoned = run_case(case, device_inputs(case, device), record, bv)
        assert leaks(case, poisoned, run_case(clean, device_inputs(clean, device), record, bv)) == []


def test_accuracy_is_that_of_the_recording(device, record) -> None:
    case = next(case for case in CASES if case.name == "t512_h2_bf")
    tensors = device_inputs(case, device)
    out, state = float64_errors(case, tensors, run_case(case, tensors, record, None))
    digests = load_digests()[case.name]
    assert out == pytest.approx(digests.rel_out, rel=0.05)
    assert state == pytest.approx(digests.rel_final_state, rel=0.05)


def test_selftest_passes(device, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(device.index) == 0
    assert f"{len(CASES)} of {len(CASES)} cases passed" in capsys.readouterr().out
