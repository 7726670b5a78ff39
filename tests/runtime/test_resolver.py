"""Which artifact made-up systems get, and what they are told if none."""

import pytest

from flashkda.errors import DriverError, NoArtifactError
from flashkda.manifest import Manifest
from flashkda.resolver import Accepted, Rejected, Request, Variants, resolve, resolve_variants


def ask(manifest: Manifest, capability: str, driver: int, kernel: str = "recurrence", bv: int | None = 64) -> object:
    return resolve(manifest, Request(kernel, "flashkda", bv, capability, driver))


@pytest.mark.parametrize(
    ("capability", "driver", "arch"),
    [("9.0", 12000, "sm_90a"), ("9.0", 13020, "sm_90a"), ("10.0", 12080, "sm_100a"), ("10.3", 12090, "sm_103a")],
)
def test_a_supported_device_gets_its_own_architectures_file(
    manifest: Manifest, capability: str, driver: int, arch: str
) -> None:
    outcome = ask(manifest, capability, driver)
    assert isinstance(outcome, Accepted)
    assert outcome.artifact.file == f"recurrence.flashkda.bv64.{arch}.cubin"


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.1", "10.1", "11.0", "12.0"])
def test_an_unsupported_device_is_told_what_there_is(manifest: Manifest, capability: str) -> None:
    outcome = ask(manifest, capability, 13000)
    assert isinstance(outcome, Rejected)
    assert outcome.reason() == f"no kernel for compute capability {capability}; there are 9.0, 10.0, 10.3"
    error = outcome.error()
    assert isinstance(error, NoArtifactError)
    assert str(error) == f"recurrence (numerics flashkda, bv 64): {outcome.reason()}"


def test_the_error_keeps_every_candidate_and_why_it_was_refused(manifest: Manifest) -> None:
    outcome = ask(manifest, "8.0", 12040)
    assert isinstance(outcome, Rejected)
    error = outcome.error()
    assert isinstance(error, NoArtifactError)
    refused = dict(error.refused)
    assert len(refused) == 9
    assert refused["recurrence.flashkda.bv64.sm_90a.cubin"] == ("sm_90a runs on compute capability 9.0, not 8.0",)
    assert refused["recurrence.flashkda.bv32.sm_100a.cubin"] == (
        "has bv 32, not 64",
        "sm_100a runs on compute capability 10.0, not 8.0",
        "needs a driver that supports CUDA 12.8, not 12.4",
    )


@pytest.mark.parametrize(
    ("capability", "driver", "floor"), [("9.0", 11080, "12.0"), ("10.0", 12070, "12.8"), ("10.3", 12080, "12.9")]
)
def test_a_driver_below_the_floor_is_its_own_error(
    manifest: Manifest, capability: str, driver: int, floor: str
) -> None:
    outcome = ask(manifest, capability, driver)
    assert isinstance(outcome, Rejected)
    error = outcome.error()
    assert isinstance(error, DriverError)
    assert f"CUDA {floor} is needed" in str(error)
    assert str(error) == outcome.reason()


def test_another_numerics_is_refused_for_that_reason(manifest: Manifest) -> None:
    outcome = resolve(manifest, Request("prepare", "accurate", None, "9.0", 13000))
    assert isinstance(outcome, Rejected)
    assert outcome.refusals[0].reasons == ("has numerics flashkda, not accurate",)
    assert not outcome.refusals[0].only_driver
    assert str(outcome.error()) == "prepare (numerics accurate): the manifest lists no such kernel"


def test_a_devices_variants_are_one_prepare_and_every_bv(manifest: Manifest) -> None:
    found = resolve_variants(manifest, numerics="flashkda", compute_capability="10.0", driver_version=12080)
    assert isinstance(found, Variants)
    assert found.prepare.arch == "sm_100a"
    assert list(found.recurrence) == [32, 64, 128]
    assert {artifact.arch for artifact in found.recurrence.values()} == {"sm_100a"}


def test_a_device_without_prepare_or_without_recurrence_is_rejected(manifest: Manifest) -> None:
    for kernel in ("prepare", "recurrence"):
        partial = manifest._replace(artifacts=tuple(found for found in manifest.artifacts if found.kernel != kernel))
        found = resolve_variants(partial, numerics="flashkda", compute_capability="9.0", driver_version=13000)
        assert isinstance(found, Rejected)
        assert str(found.error()).endswith(": the manifest lists no such kernel")
