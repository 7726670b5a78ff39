import shutil
from dataclasses import replace

import pytest

import toy_kernels
import toy_offenders
from flashkda_build.audit import Variant, _compare, audit
from flashkda_build.expectations import Expectation
from flashkda_build.occupancy import ctas_per_sm

NOTHING_FIXED = {("recurrence", None, "a"): Expectation(counts={})}
ARCHS = ["sm_90a", "sm_100a", "sm_103a"]


@pytest.fixture(scope="module")
def findings(offenders):
    return {v.label.split(".")[1]: v.findings for v in audit(offenders, toy_offenders.KERNELS, NOTHING_FIXED)}


def test_arithmetic_as_the_contract_wants_it_passes(findings):
    assert findings["clean"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unflushed", r"1 fp32 operations without \.FTZ, 0 allowed: FADD"),
        ("contracted", "1 contracted bf16/fp16 multiply-adds: HFMA2"),
        ("explicit_fma", "1 contracted bf16/fp16 multiply-adds: HFMA2"),
        ("fp16_fma", "1 contracted bf16/fp16 multiply-adds: HFMA2"),
        ("flushed_fp16", "1 bf16/fp16 operations that flush denormals"),
        ("toward_zero", r"1 roundings other than to nearest even: FADD\.FTZ\.RZ"),
        ("short_product", "other matrix: 1, the design says 0"),
        ("local", "64 bytes of local memory a thread"),
    ],
)
def test_each_broken_rule_is_found_on_every_architecture(findings, name, message):
    import re

    for arch in ARCHS:
        assert any(re.match(f"{arch}: {message}", finding) for finding in findings[name]), findings[name]


def test_an_allowed_number_of_unflushed_operations_passes(offenders):
    kernels = [spec for spec in toy_offenders.KERNELS if spec.numerics == "unflushed"]
    (variant,) = audit(offenders, tuple(kernels), {("recurrence", None, "a"): Expectation(counts={}, unflushed=1)})
    assert variant.findings == []


def table(**prepare):
    return {("prepare", None, "a"): Expectation(**prepare), ("recurrence", 32, "a"): Expectation(counts={})}


def test_counts_must_be_those_of_the_design_table(toys):
    good = audit(toys, toy_kernels.KERNELS, table(counts={"fp32 mul": 1, "HMMA.16816.F16": 0}))
    assert [v.findings for v in good] == [[], []]
    assert list(good[0].counts) == ARCHS
    bad = audit(
        toys, toy_kernels.KERNELS, table(counts={"HMMA.16816.F32.BF16": 2}, per_arch={"sm_90a": {"fp32 mul": 3}})
    )
    assert bad[0].findings == [
        "sm_90a: HMMA.16816.F32.BF16: 0, the design says 2",
        "sm_90a: fp32 mul: 1, the design says 3",
        "sm_100a: HMMA.16816.F32.BF16: 0, the design says 2",
        "sm_103a: HMMA.16816.F32.BF16: 0, the design says 2",
    ]


def test_a_kernel_that_the_design_table_lacks_fails(toys):
    others = {("prepare", None, "a"): Expectation(counts={}), ("recurrence", 32, "b"): Expectation(counts={})}
    variants = audit(toys, toy_kernels.KERNELS, others)
    assert variants[0].findings == []
    assert variants[1].findings == ["the design table has no row for ('recurrence', 32, 'a'): add one to EXPECTATIONS"]


def test_too_low_an_occupancy_fails(toys):
    spec = replace(toy_kernels.KERNELS[0], dynamic_shared_memory=100_000)
    (variant,) = audit(toys, (spec,), table(counts={}))
    assert variant.ctas_per_sm == dict.fromkeys(ARCHS, 2)
    assert len(variant.findings) == 3
    assert variant.findings[0].startswith("sm_90a: 2 CTAs fit on an SM, the design counts on 4")


def test_an_unexplained_difference_between_architectures_fails():
    variant = Variant("x", "prepare", None, "a")
    variant.counts = {"sm_90a": dict.fromkeys(audit_names(), 1), "sm_100a": dict.fromkeys(audit_names(), 1)}
    variant.counts["sm_100a"]["fp32 add"] = 2
    _compare(variant, Expectation(counts={}, per_arch={"sm_100a": {"fp32 add": 2}}))
    assert variant.findings == []
    _compare(variant, Expectation(counts={}))
    (finding,) = variant.findings
    assert "fp32 add differs between architectures, unexplained" in finding
    assert "sm_90a 1, sm_100a 2" in finding


def audit_names():
    from flashkda_build.sass import AUDITED

    return AUDITED


def test_changed_and_missing_cubins_are_named(toys, tmp_path):
    folder = tmp_path / "artifacts"
    shutil.copytree(toys, folder)
    (folder / "prepare.flashkda.a.sm_90a.cubin").unlink()
    with (folder / "prepare.flashkda.a.sm_100a.cubin").open("ab") as file:
        file.write(b"x")
    findings = audit(folder, toy_kernels.KERNELS, table(counts={}))[0].findings
    assert [finding.split(":")[0] for finding in findings] == ["sm_90a", "sm_100a"]
    assert all("build again" in finding for finding in findings)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_memory", "ctas"),
    [
        (160, 80, 98_432, 2),
        (128, 62, 0, 8),
        (1024, 64, 0, 1),
        (1024, 65, 0, 0),
        (128, 32, 0, 16),
        (32, 32, 0, 32),
        (128, 32, 227 * 1024, 1),
        (128, 32, 227 * 1024 + 1, 0),
        (128, 32, 113 * 1024, 2),
        (128, 32, 113 * 1024 + 1, 1),
        (160, 168, 0, 2),
        (128, 255, 0, 2),
    ],
)
def test_occupancy_follows_the_smallest_resource(threads, registers, shared_memory, ctas):
    assert ctas_per_sm(threads, registers, shared_memory) == ctas
