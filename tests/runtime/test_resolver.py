"""Which artifact made-up systems get, and what they are told if none."""

import pytest

from flashkda.errors import DriverError, NoArtifactError
from flashkda.manifest import Artifact, Manifest
from flashkda.resolver import Accepted, Rejected, Request, Variants, resolve, resolve_variants


def ask(manifest: Manifest, capability: str, driver: int, kernel: str = "recurrence", bv: int | None = 64) -> object:
    return resolve(manifest, Request(kernel, "flashkda", bv, None, capability, driver))


def without(manifest: Manifest, kernel: str, orders: str, arch: str = "sm_") -> Manifest:
    """Without a kernel's artifacts in these record orders, for architectures that begin so."""

    def dropped(found: Artifact) -> bool:
        return found.kernel == kernel and found.record_order in orders and found.arch.startswith(arch)

    return manifest._replace(artifacts=tuple(found for found in manifest.artifacts if not dropped(found)))


def variants_of(manifest: Manifest, capability: str = "9.0") -> Variants | Rejected:
    return resolve_variants(manifest, numerics="flashkda", compute_capability=capability, driver_version=13000)


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
    assert len(refused) == 12
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
    outcome = resolve(manifest, Request("prepare", "accurate", None, "a", "9.0", 13000))
    assert isinstance(outcome, Rejected)
    assert outcome.refusals[0].reasons == ("has numerics flashkda, not accurate",)
    assert not outcome.refusals[0].only_driver
    assert str(outcome.error()) == "prepare (numerics accurate, record order a): the manifest lists no such kernel"


def test_another_record_order_is_refused_for_that_reason(manifest: Manifest) -> None:
    found = resolve(manifest, Request("prepare", "flashkda", None, "b", "9.0", 13000))
    assert isinstance(found, Accepted) and found.artifact.file == "prepare.flashkda.b.sm_90a.cubin"
    outcome = resolve(without(manifest, "prepare", "b"), Request("prepare", "flashkda", None, "b", "9.0", 13000))
    assert isinstance(outcome, Rejected)
    assert outcome.refusals[0].reasons == ("has record order a, not b",)
    assert str(outcome.error()) == "prepare (numerics flashkda, record order b): the manifest lists no such kernel"


def test_a_devices_variants_are_every_bv_and_the_prepares_of_their_orders(manifest: Manifest) -> None:
    found = variants_of(manifest, "10.0")
    assert isinstance(found, Variants)
    assert list(found.prepare) == ["a", "b"]
    assert list(found.recurrence) == [16, 32, 64, 128]
    assert {artifact.arch for artifact in found.artifacts()} == {"sm_100a"} and len(found.artifacts()) == 6
    assert [found.prepare_for(bv).record_order for bv in found.recurrence] == ["a", "b", "b", "b"]


@pytest.mark.parametrize(("order", "left"), [("a", [32, 64, 128]), ("b", [16])])
def test_a_recurrence_whose_order_has_no_prepare_kernel_is_left_out(
    manifest: Manifest, order: str, left: list[int]
) -> None:
    for arch in ("sm_", "sm_90a"):
        found = variants_of(without(manifest, "prepare", order, arch))
        assert isinstance(found, Variants)
        assert list(found.recurrence) == left
        assert len(found.prepare) == 1 and order not in found.prepare
    other = variants_of(without(manifest, "prepare", order, "sm_90a"), "10.0")
    assert isinstance(other, Variants) and len(other.recurrence) == 4


def test_a_prepare_kernel_whose_records_nothing_reads_is_left_out(manifest: Manifest) -> None:
    found = variants_of(without(manifest, "recurrence", "a"))
    assert isinstance(found, Variants)
    assert (list(found.prepare), list(found.recurrence)) == (["b"], [32, 64, 128])


def test_a_device_without_prepare_or_without_recurrence_is_rejected(manifest: Manifest) -> None:
    for kernel in ("prepare", "recurrence"):
        found = variants_of(without(manifest, kernel, "ab"))
        assert isinstance(found, Rejected)
        assert str(found.error()).endswith(": the manifest lists no such kernel")


def test_a_device_whose_kernels_do_not_go_together_is_told_which_prepare_is_missing(manifest: Manifest) -> None:
    found = variants_of(without(without(manifest, "prepare", "b", "sm_90a"), "recurrence", "a"))
    assert isinstance(found, Rejected)
    assert str(found.error()) == (
        "prepare (numerics flashkda, record order b): no kernel for compute capability 9.0; there are 10.0, 10.3"
    )
