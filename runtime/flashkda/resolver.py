"""Which compiled kernel a device gets. Pure: every fact about the system is an argument."""

from typing import NamedTuple

from flashkda.errors import DriverError, FlashKDAError, NoArtifactError
from flashkda.manifest import Artifact, Manifest

DEFAULT_NUMERICS = "flashkda"


class Request(NamedTuple):
    """What is looked for: a kernel variant for a device. `driver_version` counts as cuDriverGetVersion does."""

    kernel: str
    numerics: str
    bv: int | None
    compute_capability: str
    driver_version: int

    def __str__(self) -> str:
        return f"{self.kernel} (numerics {self.numerics}" + (f", bv {self.bv})" if self.bv is not None else ")")


class Refusal(NamedTuple):
    """A candidate and every reason against it; `only_driver`: a newer driver alone would make it fit."""

    artifact: Artifact
    reasons: tuple[str, ...]
    only_driver: bool


class Accepted(NamedTuple):
    """The one artifact that fits."""

    artifact: Artifact


class Rejected(NamedTuple):
    """Nothing fits; `refusals` has every artifact of the kernel asked for."""

    request: Request
    refusals: tuple[Refusal, ...]

    def reason(self) -> str:
        """Why nothing fits, in one line: what the driver or the device would have to be."""
        request = self.request
        too_old = self._too_old()
        if too_old is not None:
            return (
                f"the CUDA driver is too old for {too_old.file}: it supports CUDA "
                f"{cuda_version(request.driver_version)}, and CUDA {cuda_version(too_old.least_driver)} is needed; "
                "update the NVIDIA driver"
            )
        variant = [
            refusal.artifact
            for refusal in self.refusals
            if (refusal.artifact.numerics, refusal.artifact.bv) == (request.numerics, request.bv)
        ]
        if not variant:
            return "the manifest lists no such kernel"
        there = dict.fromkeys(capability for artifact in variant for capability in artifact.compute_capabilities)
        return f"no kernel for compute capability {request.compute_capability}; there are {', '.join(there)}"

    def error(self) -> FlashKDAError:
        """The exception to raise: `DriverError` if a newer driver would do, else `NoArtifactError`."""
        if self._too_old() is not None:
            return DriverError(self.reason())
        refused = tuple((refusal.artifact.file, refusal.reasons) for refusal in self.refusals)
        return NoArtifactError(f"{self.request}: {self.reason()}", refused)

    def _too_old(self) -> Artifact | None:
        """The artifact that a newer driver alone would make fit."""
        return next((refusal.artifact for refusal in self.refusals if refusal.only_driver), None)


def resolve(manifest: Manifest, request: Request) -> Accepted | Rejected:
    """The artifact for a request, or every candidate with why it was refused.

    At most one can fit: the manifest parser refuses two artifacts with the same claim.
    """
    refusals = []
    for artifact in manifest.artifacts:
        if artifact.kernel != request.kernel:
            continue
        reasons = []
        if artifact.numerics != request.numerics:
            reasons.append(f"has numerics {artifact.numerics}, not {request.numerics}")
        if artifact.bv != request.bv:
            reasons.append(f"has bv {artifact.bv}, not {request.bv}")
        if request.compute_capability not in artifact.compute_capabilities:
            runs_on = ", ".join(artifact.compute_capabilities)
            reasons.append(f"{artifact.arch} runs on compute capability {runs_on}, not {request.compute_capability}")
        fits_but_driver = not reasons
        if request.driver_version < artifact.least_driver:
            reasons.append(
                f"needs a driver that supports CUDA {cuda_version(artifact.least_driver)}, "
                f"not {cuda_version(request.driver_version)}"
            )
        if not reasons:
            return Accepted(artifact)
        refusals.append(Refusal(artifact, tuple(reasons), fits_but_driver))
    return Rejected(request, tuple(refusals))


def listed_bvs(manifest: Manifest, numerics: str) -> tuple[int, ...]:
    """Every BV the manifest has for `numerics`, on any architecture, ascending."""
    return tuple(
        sorted({found.bv for found in manifest.artifacts if found.numerics == numerics and found.bv is not None})
    )


class Variants(NamedTuple):
    """Everything one device can run: the prepare kernel and the recurrence kernels by BV, ascending."""

    prepare: Artifact
    recurrence: dict[int, Artifact]


def resolve_variants(
    manifest: Manifest, *, numerics: str, compute_capability: str, driver_version: int
) -> Variants | Rejected:
    """All variants for a device; rejected if it has no prepare kernel or no recurrence kernel at any BV."""

    def look_for(kernel: str, bv: int | None) -> Accepted | Rejected:
        return resolve(manifest, Request(kernel, numerics, bv, compute_capability, driver_version))

    prepare = look_for("prepare", None)
    if isinstance(prepare, Rejected):
        return prepare
    bvs = listed_bvs(manifest, numerics)
    outcomes = {bv: look_for("recurrence", bv) for bv in bvs}
    recurrence = {bv: found.artifact for bv, found in outcomes.items() if isinstance(found, Accepted)}
    if recurrence:
        return Variants(prepare.artifact, recurrence)
    for outcome in outcomes.values():
        if isinstance(outcome, Rejected):
            return outcome
    return Rejected(Request("recurrence", numerics, None, compute_capability, driver_version), ())


def cuda_version(version: int) -> str:
    """12080 -> '12.8'."""
    return f"{version // 1000}.{version % 1000 // 10}"
