"""What `flashkda info` reports: a plain dictionary, in which everything that is wrong is told, not raised."""

import platform
from typing import Any

from flashkda import __version__
from flashkda.artifacts import MANIFEST_NAME, OVERRIDE, ArtifactFolder, folder_path, open_folder
from flashkda.driver import DeviceFacts, Driver, get_driver
from flashkda.errors import ArtifactError, DriverError
from flashkda.resolver import DEFAULT_NUMERICS, Accepted, Request, cuda_version, listed_bvs, resolve


def collect() -> dict[str, Any]:
    """The report. `ok` is False if the installed files are not usable; a machine without a GPU is fine."""
    path, overridden = folder_path()
    report: dict[str, Any] = {
        "package": {"version": __version__, "python": platform.python_version(), "machine": platform.machine()},
        "artifacts": {"folder": str(path), "overridden_by": OVERRIDE if overridden else None},
        "driver": None,
        "devices": [],
        "ok": True,
    }
    folder: ArtifactFolder | None = None
    try:
        folder = open_folder(path, overridden)
        report["artifacts"] |= _artifacts(folder)
        report["ok"] = not report["artifacts"]["problems"]
    except ArtifactError as error:
        report["artifacts"]["problems"] = [str(error)]
        report["ok"] = False
    try:
        driver = get_driver()
        report["driver"] = {"cuda": cuda_version(driver.version), "version": driver.version}
        for ordinal in range(driver.device_count()):
            report["devices"].append(_device(driver, driver.facts(ordinal), folder))
    except DriverError as error:
        report["driver_problem"] = str(error)
    return report


def _artifacts(folder: ArtifactFolder) -> dict[str, Any]:
    manifest = folder.manifest
    files, problems = [], []
    for artifact in manifest.artifacts:
        try:
            folder.read(artifact)
        except ArtifactError as error:
            problems.append(str(error))
        files.append(
            {
                "file": artifact.file,
                "arch": artifact.arch,
                "compute_capabilities": list(artifact.compute_capabilities),
                "size": artifact.size,
                "sha256": artifact.sha256,
                "least_driver": cuda_version(artifact.least_driver),
            }
        )
    known = {artifact.file for artifact in manifest.artifacts} | {MANIFEST_NAME}
    return {
        "manifest": {
            "schema_version": manifest.schema_version,
            "package_version": manifest.package_version,
            "source_digest": manifest.source_digest,
            "dsl": f"{manifest.toolchain.dsl} {manifest.toolchain.dsl_version} ({manifest.toolchain.flavour})",
            "ptxas": manifest.toolchain.ptxas_version,
        },
        "files": files,
        "unlisted": sorted(item.name for item in folder.path.iterdir() if item.name not in known),
        "problems": problems,
    }


def _device(driver: Driver, facts: DeviceFacts, folder: ArtifactFolder | None) -> dict[str, Any]:
    kernels = []
    if folder is not None:
        variants: list[tuple[str, int | None]] = [("prepare", None)]
        variants += [("recurrence", bv) for bv in listed_bvs(folder.manifest, DEFAULT_NUMERICS)]
        for kernel, bv in variants:
            request = Request(kernel, DEFAULT_NUMERICS, bv, facts.compute_capability, driver.version)
            outcome = resolve(folder.manifest, request)
            entry: dict[str, Any] = {"kernel": kernel, "bv": bv, "file": None, "refused": {}}
            if isinstance(outcome, Accepted):
                entry["file"] = outcome.artifact.file
            else:
                entry["refused"] = {refusal.artifact.file: list(refusal.reasons) for refusal in outcome.refusals}
            kernels.append(entry)
    return {
        "ordinal": facts.ordinal,
        "name": facts.name,
        "compute_capability": facts.compute_capability,
        "sm_count": facts.sm_count,
        "kernels": kernels,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report for a person."""
    package, artifacts = report["package"], report["artifacts"]
    source = f"set by {artifacts['overridden_by']}" if artifacts["overridden_by"] else "in the package"
    text = [
        f"flashkda {package['version']}, Python {package['python']}, {package['machine']}",
        f"artifacts: {artifacts['folder']} ({source})",
    ]
    if "manifest" in artifacts:
        manifest = artifacts["manifest"]
        text.append(
            f"manifest: schema {manifest['schema_version']}, {manifest['dsl']}, ptxas {manifest['ptxas']}, "
            f"source {manifest['source_digest'][:16]}"
        )
        for file in artifacts["files"]:
            runs_on = ", ".join(file["compute_capabilities"])
            text.append(f"  {file['file']}: {file['size']} bytes, device {runs_on}, driver {file['least_driver']}+")
        text += [f"  not in the manifest, never loaded: {name}" for name in artifacts["unlisted"]]
    text += [f"PROBLEM: {problem}" for problem in artifacts["problems"]]
    if report["driver"] is not None:
        text.append(f"driver: supports CUDA {report['driver']['cuda']}")
    if "driver_problem" in report:
        text.append(f"driver: {report['driver_problem']}")
    if not report["devices"]:
        text.append("devices: none")
    for device in report["devices"]:
        text.append(
            f"device {device['ordinal']}: {device['name']}, compute capability {device['compute_capability']}, "
            f"{device['sm_count']} SMs"
        )
        for kernel in device["kernels"]:
            label = kernel["kernel"] if kernel["bv"] is None else f"{kernel['kernel']} bv {kernel['bv']}"
            text.append(f"  {label}: {kernel['file'] or 'no artifact'}")
            text += [f"    {file}: {'; '.join(reasons)}" for file, reasons in kernel["refused"].items()]
    return text
