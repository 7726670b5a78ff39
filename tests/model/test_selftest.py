"""The self-test's verdicts, with a fake kernel in the place of the GPU's."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from recorded import RECORD  # noqa: E402

import flashkda.goldens.cases  # noqa: E402
import flashkda.goldens.run  # noqa: E402
import flashkda.kernels  # noqa: E402
from flashkda import selftest  # noqa: E402
from flashkda.errors import FlashKDAError  # noqa: E402
from flashkda.goldens.cases import case_named  # noqa: E402
from flashkda.goldens.record import encode_records, plain_shape  # noqa: E402
from flashkda.goldens.run import device_inputs  # noqa: E402
from flashkda.reference import kda_float64  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tuple(case_named(name) for name in ("t17_h1_bf", "vl_gap", "nan_v_in_tail"))
    monkeypatch.setattr(flashkda.goldens.cases, "CASES", chosen)


@pytest.fixture
def accurate(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A kernel with the right values but other bits; `break_bv` makes one BV differ, `leak` lets poison spread.

    Its records count upwards, in order "a" at BV 16; `break_record` exchanges two values of a field there.
    """
    faults = {"break_bv": None, "leak": False, "break_record": None}

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, **more) -> None:
        heads = q.shape[2]
        cu_seqlens = more["cu_seqlens"]
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        v = v if faults["leak"] else v.nan_to_num(0.0)
        sequences = list(pairwise(bounds))
        result, state = kda_float64(
            q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, sequences, more["initial_state"]
        )  # fmt: skip
        if faults["leak"] and result.isnan().any() and heads == 2:
            result = result + result.nansum() * torch.nan
        owned = [row for start, end in sequences for row in range(start, end)]
        out[0, owned] = result[0, owned].to(out.dtype)
        more["final_state"].copy_(state)
        if more["bv"] == faults["break_bv"] is not None:
            out.view(torch.int16)[0, owned[0], 0, 0] ^= 1
        order, count = order_at(more["bv"]), len(more["workspace"]) // RECORD.bytes
        arrays = {}
        for field in RECORD.fields:
            shape = (count, *plain_shape(field.name, field.shape))
            arrays[field.name] = np.arange(np.prod(shape)).astype({"bf16": np.uint16, "fp32": np.uint32}[field.dtype])
            arrays[field.name] = arrays[field.name].reshape(shape)
        if order == "a" and faults["break_record"] is not None:
            broken = arrays[faults["break_record"]].reshape(-1)
            broken[[3, 6]] = broken[[6, 3]]
        more["workspace"].copy_(torch.from_numpy(encode_records(arrays, RECORD, order)))

    def order_at(bv: int | None) -> str:
        return "a" if bv == 16 else "b"

    monkeypatch.setattr(flashkda.goldens.run, "fwd", fwd)
    monkeypatch.setattr(flashkda.goldens.run, "record_order", lambda *arguments: order_at(arguments[-1]))
    return faults


def test_right_values_pass_where_bits_are_not_asked_for(cases, accurate) -> None:
    outcomes = selftest.run_cases(CPU, RECORD, (32, 64), exact=False)
    assert [outcome.name for outcome in outcomes] == ["t17_h1_bf", "vl_gap", "nan_v_in_tail"]
    assert all(outcome.failures == [] for outcome in outcomes)
    assert 0 < outcomes[0].rel_out < 0.01 and outcomes[2].rel_out is None


def test_other_bits_fail_where_they_are_asked_for(cases, accurate) -> None:
    first = selftest.run_cases(CPU, RECORD, (32,), exact=True)[0]
    assert {"out differs", "final_state differs", "inv differs"} <= set(first.failures)


def test_a_bv_that_differs_is_named(cases, accurate) -> None:
    accurate["break_bv"] = 64
    for outcome in selftest.run_cases(CPU, RECORD, (32, 64), exact=False):
        assert outcome.failures == ["bv=64 differs from the automatic choice"]


def test_records_of_two_orders_are_compared_by_their_values(cases, accurate) -> None:
    assert all(not one.failures for one in selftest.run_cases(CPU, RECORD, (16, 32, 64), exact=False))
    for field in RECORD.fields:
        accurate["break_record"] = field.name
        for outcome in selftest.run_cases(CPU, RECORD, (16, 32), exact=False):
            assert outcome.failures == ["bv=16 differs from the automatic choice"]


def test_wrong_values_fail(cases, accurate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashkda.goldens.run, "fwd", lambda *args, **more: args[6].fill_(1.0))
    first = selftest.run_cases(CPU, RECORD, (), exact=False)[0]
    assert any(failure.startswith("relative error of out") for failure in first.failures)


def test_poison_that_spreads_is_reported(cases, accurate) -> None:
    accurate["leak"] = True
    poisoned = selftest.run_cases(CPU, RECORD, (), exact=False)[2]
    assert poisoned.failures == ["the poison leaks into out"]


@pytest.mark.parametrize(("failures", "code"), [([], 0), (["out differs"], 1)])
def test_exit_code_and_reports(failures: list[str], code: int, monkeypatch, capsys) -> None:
    facts = SimpleNamespace(name="a chip", compute_capability="9.0")
    kernels = SimpleNamespace(
        facts=facts, variants=SimpleNamespace(recurrence={32: None}),
        manifest=SimpleNamespace(contract=SimpleNamespace(record=RECORD)),
    )  # fmt: skip
    monkeypatch.setattr(flashkda.kernels, "device_kernels", lambda ordinal: kernels)
    monkeypatch.setattr(selftest, "run_cases", lambda *_: [selftest.Outcome("t1_h1", failures, 0.004)])
    assert selftest.run(0) == code
    table = capsys.readouterr().out
    assert "t1_h1" in table and f"{1 - code} of 1 cases passed" in table
    assert selftest.run(0, json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0) and report["cases"][0]["failures"] == failures


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "find_spec", lambda name: None if name == module else object())
    with pytest.raises(FlashKDAError, match=f"needs {module}"):
        selftest.run()


def test_inputs_reach_the_device_with_their_bits() -> None:
    tensors = device_inputs(case_named("vl_0_5_33_fp"), CPU)
    assert tensors["q"].dtype == torch.bfloat16 and tensors["initial_state"].dtype == torch.float32
    assert tensors["cu_seqlens"].tolist() == [0, 0, 5, 38]
