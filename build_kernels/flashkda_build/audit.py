"""Checks the machine code of a built folder against the design: roundings, tensor-core work, memory, occupancy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import sass
from .cubin import read_cubin
from .expectations import Expectation
from .manifest import MANIFEST, damaged_files, read_manifest
from .occupancy import ctas_per_sm
from .spec import KernelSpec

Expectations = Mapping[tuple[str, int | None, str], Expectation]


@dataclass
class Variant:
    """One variant on all its architectures. counts: architecture -> audited name -> number."""

    label: str
    kernel: str
    bv: int | None
    record_order: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    ctas_per_sm: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def _some(instructions: list[sass.Instruction]) -> str:
    shown = "; ".join(str(instruction) for instruction in instructions[:3])
    return shown if len(instructions) <= 3 else f"{shown}; ..."


def audit_cubin(spec: KernelSpec, arch: str, data: bytes, expectation: Expectation, variant: Variant) -> None:
    """Adds one cubin's counts, occupancy and findings to `variant`."""

    def find(text: str) -> None:
        variant.findings.append(f"{arch}: {text}")

    instructions = sass.disassemble(data)
    cubin = read_cubin(data)
    variant.counts[arch] = sass.audited_counts(instructions)

    unflushed = sass.without_flush(instructions)
    if len(unflushed) > expectation.unflushed:
        find(f"{len(unflushed)} fp32 operations without .FTZ, {expectation.unflushed} allowed: {_some(unflushed)}")
    for offenders, what in (
        (sass.contracted(instructions), "contracted bf16/fp16 multiply-adds"),
        (sass.wrongly_flushed(instructions), "bf16/fp16 operations that flush denormals"),
        (sass.not_nearest(instructions), "roundings other than to nearest even"),
    ):
        if offenders:
            find(f"{len(offenders)} {what}: {_some(offenders)}")
    if cubin.frame:
        find(f"{cubin.frame} bytes of local memory a thread (a spill, or an array that is not in registers)")
    for name, wanted in expectation.on(arch).items():
        if variant.counts[arch][name] != wanted:
            find(f"{name}: {variant.counts[arch][name]}, the design says {wanted}")

    shared = cubin.static_shared_memory + spec.dynamic_shared_memory
    fits = variant.ctas_per_sm[arch] = ctas_per_sm(spec.threads, cubin.registers, shared)
    if fits < spec.min_ctas_per_sm:
        find(
            f"{fits} CTAs fit on an SM, the design counts on {spec.min_ctas_per_sm} "
            f"({spec.threads} threads, {cubin.registers} registers, {shared} bytes of shared memory)"
        )


def _compare(variant: Variant, expectation: Expectation) -> None:
    """A count that the table leaves open must at least be the same on every architecture."""
    for name in sass.AUDITED:
        if all(name not in expectation.on(arch) for arch in variant.counts):
            counts = {arch: counts[name] for arch, counts in variant.counts.items()}
            if len(set(counts.values())) > 1:
                said = ", ".join(f"{arch} {count}" for arch, count in counts.items())
                variant.findings.append(
                    f"{name} differs between architectures, unexplained by the design table: {said}"
                )


def audit(folder: Path, kernels: tuple[KernelSpec, ...], expectations: Expectations) -> list[Variant]:
    """Audits every cubin that the manifest in `folder` names; -> one Variant each, with its findings.

    Raises BuildError if the folder has no manifest or nvdisasm is missing.
    """
    manifest: dict[str, Any] = read_manifest(folder / MANIFEST)
    damaged = damaged_files(folder, manifest)
    variants = []
    for spec in kernels:
        variant = Variant(spec.label, spec.kernel, spec.bv, spec.record_order)
        variants.append(variant)
        key = (spec.kernel, spec.bv, spec.record_order)
        expectation = expectations.get(key)
        if expectation is None:
            variant.findings.append(f"the design table has no row for {key}: add one to EXPECTATIONS")
            expectation = Expectation(counts={})
        artifacts = [a for a in manifest["artifacts"] if a["file"].startswith(f"{spec.label}.sm_")]
        if not artifacts:
            variant.findings.append("the manifest has no cubin of this variant: build again")
        for artifact in artifacts:
            if artifact["file"] in damaged:
                variant.findings.append(
                    f"{artifact['arch']}: {artifact['file']} is missing or differs from its sha256: build again"
                )
            else:
                audit_cubin(spec, artifact["arch"], (folder / artifact["file"]).read_bytes(), expectation, variant)
        _compare(variant, expectation)
    return variants
