"""Which compiled kernel a device gets. Pure: every fact about the system is an argument."""

from typing import NamedTuple

from flashkda.errors import DriverError, FlashKDAError, NoArtifactError
from flashkda.manifest import Artifact, Manifest

DEFAULT_NUMERICS = "flashkda"


class Request(NamedTuple):
    """What is looked for: a kernel variant for a device. `driver_version` counts as cuDriverGetVersion does.

    bv: of a recurrence, None for prepare; record_order: of prepare, None for a recurrence, which has the one it has.
    """

    kernel: str
    numerics: str
    bv: int | None
    record_order: str | None
    compute_capability: str
    driver_version: int

    def __str__(self) -> str:
        bv = "" if self.bv is None else f", bv {self.bv}"
        order = "" if self.record_order is None else f", record order {self.record_order}"
        return f"{self.kernel} (numerics {self.numerics}{bv}{order})"


class Refusal(NamedTuple):
    """A candidate and every reason against it; `only_driver`: a newer driver alone would make it fit."""

    artifact: Artifact
    reasons: tuple[str, ...]
    only_driver: bool


class Accepted(NamedTuple):
    """The one artifact that fits."""

    artifact: Artifact


class Rejected(NamedTuple):
    """Nothing fits; `refusals` has every artifact of the kernel asked for.

    request: what was asked for, or the prepare kernel that a recurrence which would fit is missing.
    """

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
            and request.record_order in (None, refusal.artifact.record_order)
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

    At most one can fit: the manifest parser refuses two artifacts with the same claim. A recurrence fits only with a
    prepare kernel that writes records in its order.
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
        if request.record_order not in (None, artifact.record_order):
            reasons.append(f"has record order {artifact.record_order}, not {request.record_order}")
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
            if artifact.kernel == "recurrence":
                needed = request._replace(kernel="prepare", bv=None, record_order=artifact.record_order)
                prepare = resolve(manifest, needed)
                if isinstance(prepare, Rejected):
                    return prepare
            return Accepted(artifact)
        refusals.append(Refusal(artifact, tuple(reasons), fits_but_driver))
    return Rejected(request, tuple(refusals))


def listed_bvs(manifest: Manifest, numerics: str) -> tuple[int, ...]:
    """Every BV the manifest has for `numerics`, on any architecture, ascending."""
    return tuple(
        sorted({found.bv for found in manifest.artifacts if found.numerics == numerics and found.bv is not None})
    )


def listed_orders(manifest: Manifest, numerics: str) -> tuple[str, ...]:
    """Every record order the manifest's kernels have for `numerics`, on any architecture, ascending."""
    return tuple(sorted({found.record_order for found in manifest.artifacts if found.numerics == numerics}))


class Variants(NamedTuple):
    """Everything one device can run, ascending: the recurrence kernels by BV and, by record order, their prepares."""

    prepare: dict[str, Artifact]
    recurrence: dict[int, Artifact]

    def prepare_for(self, bv: int) -> Artifact:
        """The prepare kernel whose records the recurrence of this BV reads."""
        return self.prepare[self.recurrence[bv].record_order]

    def artifacts(self) -> tuple[Artifact, ...]:
        """All of them."""
        return (*self.prepare.values(), *self.recurrence.values())


def resolve_variants(
    manifest: Manifest, *, numerics: str, compute_capability: str, driver_version: int
) -> Variants | Rejected:
    """All variants for a device; rejected if it has no recurrence kernel with its prepare kernel at any BV."""

    def look_for(kernel: str, bv: int | None, record_order: str | None) -> Accepted | Rejected:
        return resolve(manifest, Request(kernel, numerics, bv, record_order, compute_capability, driver_version))

    outcomes = {bv: look_for("recurrence", bv, None) for bv in listed_bvs(manifest, numerics)}
    recurrence = {bv: found.artifact for bv, found in outcomes.items() if isinstance(found, Accepted)}
    if recurrence:
        read = {found.record_order for found in recurrence.values()}
        prepares = {order: look_for("prepare", None, order) for order in sorted(read)}
        prepare = {order: found.artifact for order, found in prepares.items() if isinstance(found, Accepted)}
        return Variants(prepare, recurrence)
    for outcome in outcomes.values():
        if isinstance(outcome, Rejected):
            return outcome
    return Rejected(Request("recurrence", numerics, None, None, compute_capability, driver_version), ())


def cuda_version(version: int) -> str:
    """12080 -> '12.8'."""
    return f"{version // 1000}.{version % 1000 // 10}"
