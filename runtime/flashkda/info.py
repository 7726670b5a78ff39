"""What `flashkda info` reports: a plain dictionary, in which everything that is wrong is told, not raised."""

import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from flashkda import __version__
from flashkda.alias import FOLDER, NAME, refuse_another
from flashkda.artifacts import MANIFEST_NAME, OVERRIDE, ArtifactFolder, folder_path, open_folder
from flashkda.driver import DeviceFacts, Driver, get_driver
from flashkda.errors import AliasError, ArtifactError, DriverError
from flashkda.nvml import open_nvml
from flashkda.resolver import DEFAULT_NUMERICS, Accepted, Request, cuda_version, listed_bvs, listed_orders, resolve

#: Distributions that a call runs on; their versions are told without importing them.
DISTRIBUTIONS = ("torch", "cuda-python", "cuda-bindings")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def collect() -> dict[str, Any]:
    """The report. `ok` is False if the installed files are not usable; a machine without a GPU is fine."""
    path, overridden = folder_path()
    report: dict[str, Any] = {
        "package": {"version": __version__},
        "system": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip() or None,
            VISIBLE_DEVICES: os.environ.get(VISIBLE_DEVICES),
        },
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        NAME: _flash_kda(),
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
        nvml = open_nvml()
        release = None if nvml is None else nvml[1]
        report["driver"] = {"cuda": cuda_version(driver.version), "version": driver.version, "release": release}
        for ordinal in range(driver.device_count()):
            report["devices"].append(_device(driver, driver.facts(ordinal), folder))
    except DriverError as error:
        report["driver_problem"] = str(error)
    return report


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _flash_kda() -> dict[str, str | None]:
    """What `import flash_kda` would find. whose: "flashkda", "another" or None; problem: why the import would fail."""
    try:
        found = find_spec(NAME)
    except ValueError:
        # Somebody put a module without a specification into sys.modules.
        return {"whose": "another", "file": None, "problem": None}
    if found is None or not found.has_location or found.origin is None:
        return {"whose": None, "file": None, "problem": None}
    if not os.path.realpath(found.origin).startswith(os.path.realpath(FOLDER) + os.sep):
        return {"whose": "another", "file": found.origin, "problem": None}
    problem = None
    try:
        refuse_another()
    except AliasError as error:
        problem = str(error)
    return {"whose": "flashkda", "file": found.origin, "problem": problem}


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
        manifest = folder.manifest
        variants: list[tuple[str, int | None, str | None]] = [
            *(("prepare", None, order) for order in listed_orders(manifest, DEFAULT_NUMERICS)),
            *(("recurrence", bv, None) for bv in listed_bvs(manifest, DEFAULT_NUMERICS)),
        ]
        for kernel, bv, order in variants:
            request = Request(kernel, DEFAULT_NUMERICS, bv, order, facts.compute_capability, driver.version)
            outcome = resolve(manifest, request)
            entry: dict[str, Any] = {"kernel": kernel, "bv": bv, "record_order": order, "file": None}
            entry |= {"reason": None, "refused": {}}
            if isinstance(outcome, Accepted):
                entry["file"] = outcome.artifact.file
            else:
                missing = "" if outcome.request == request else f"without {outcome.request}: "
                entry["reason"] = missing + outcome.reason()
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
    system, artifacts = report["system"], report["artifacts"]
    source = f"set by {artifacts['overridden_by']}" if artifacts["overridden_by"] else "in the package"
    text = [
        f"flashkda {report['package']['version']}, Python {system['python']}, {system['platform']}",
        ", ".join(f"{name} {version or 'not installed'}" for name, version in report["versions"].items()),
        f"{NAME}: {_whose(report[NAME])}",
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
        release = report["driver"]["release"]
        text.append(f"driver: {f'release {release}, ' if release else ''}supports CUDA {report['driver']['cuda']}")
    if "driver_problem" in report:
        text.append(f"driver: {report['driver_problem']}")
    if system[VISIBLE_DEVICES] is not None:
        text.append(f"{VISIBLE_DEVICES}: {system[VISIBLE_DEVICES]!r}")
    if not report["devices"]:
        text.append("devices: none")
    for device in report["devices"]:
        text.append(
            f"device {device['ordinal']}: {device['name']}, compute capability {device['compute_capability']}, "
            f"{device['sm_count']} SMs"
        )
        for kernel in device["kernels"]:
            label = kernel["kernel"]
            label += "" if kernel["bv"] is None else f" bv {kernel['bv']}"
            label += "" if kernel["record_order"] is None else f" record order {kernel['record_order']}"
            text.append(f"  {label}: {kernel['file'] or kernel['reason']}")
    return text


def _whose(flash_kda: dict[str, str | None]) -> str:
    file, problem = flash_kda["file"], flash_kda["problem"]
    if problem is not None:
        return f"this package, from {file}, but its import fails: {problem}"
    if flash_kda["whose"] is None:
        return "none"
    return f"{'this package' if flash_kda['whose'] == 'flashkda' else 'another one'}, from {file or 'no file'}"
