"""The manifest: what was built, from what, and how each kernel is launched. Its schema is manifests/schema.json."""

import importlib
import json
from pathlib import Path
from typing import Any

from flashkda import __version__

from .architectures import Architecture
from .cubin import read_cubin
from .digest import sha256, source_digest
from .errors import BuildError
from .spec import PARAMETER_SIZES, KernelSpec, load_kernels
from .toolchain import require_ptxas, toolchain

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
WORKSPACE_ALIGNMENT = 16  # bytes; what a bulk copy asks of its source


def describe_artifact(spec: KernelSpec, arch: Architecture, data: bytes) -> dict[str, Any]:
    """The manifest's entry for one cubin. Raises BuildError where it contradicts the variant table or the toolchain."""
    cubin = read_cubin(data)
    label = spec.file_name(arch.name)
    require_ptxas(label, cubin.cuda_version, cubin.ptxas_version)
    sizes = [size for _, size in cubin.parameters]
    wanted = [PARAMETER_SIZES[kind] for _, kind in spec.parameters]
    if sizes != wanted:
        raise BuildError(f"{label} takes parameters of {sizes} bytes, the variant table says {wanted}: make them agree")
    if cubin.threads != spec.threads:
        raise BuildError(
            f"{label} has {cubin.threads} threads a CTA, the variant table says {spec.threads}: make them agree"
        )
    if cubin.sm != arch.sm:
        raise BuildError(f"{label} is compiled for sm_{cubin.sm}: the DSL did not follow CUTE_DSL_ARCH={arch.name}")
    return {
        "kernel": spec.kernel,
        "numerics": spec.numerics,
        "bv": spec.bv,
        "record_order": spec.record_order,
        "arch": arch.name,
        "compute_capabilities": list(arch.compute_capabilities),
        "file": label,
        "size": len(data),
        "sha256": sha256(data),
        "entry": cubin.entry,
        "parameters": [
            {"name": name, "type": kind, "offset": offset, "size": size}
            for (name, kind), (offset, size) in zip(spec.parameters, cubin.parameters, strict=True)
        ],
        "threads": spec.threads,
        "units_per_cta": spec.units_per_cta,
        "dynamic_shared_memory": spec.dynamic_shared_memory,
        "static_shared_memory": cubin.static_shared_memory,
        "registers": cubin.registers,
        "least_driver": arch.least_driver,
    }


def describe_folder(folder: Path, package: str, architectures: tuple[Architecture, ...]) -> dict[str, Any]:
    """The manifest of the cubins of `package` for `architectures` that lie in `folder`."""
    record = importlib.import_module(f"{package}.record")
    fields = [{"name": n, "offset": o, "bytes": b, "dtype": d, "shape": list(s)} for n, o, b, d, s in record.FIELDS]
    return {
        "schema_version": SCHEMA_VERSION,
        "package_version": __version__,
        "source_digest": source_digest(package),
        "toolchain": toolchain(load_kernels(package)),
        "build_command": "flashkda-build",
        "contract": {
            "head_dim": record.HEAD_DIM,
            "chunk": record.CHUNK,
            "workspace_alignment": WORKSPACE_ALIGNMENT,
            "record": {"bytes": record.RECORD_BYTES, "fields": fields},
        },
        "artifacts": [
            describe_artifact(spec, arch, (folder / spec.file_name(arch.name)).read_bytes())
            for arch in architectures
            for spec in load_kernels(package)
        ],
    }


def canonical(manifest: dict[str, Any]) -> str:
    """The one spelling of a manifest: sorted keys, two spaces, a newline at the end."""
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def read_manifest(path: Path, if_missing: str = "run flashkda-build first, or name another folder") -> dict[str, Any]:
    """Raises BuildError if the file is missing, is not JSON, or is of another schema version.

    if_missing: what to do in the first case.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BuildError(f"there is no manifest {path}; {if_missing}") from None
    except (ValueError, OSError) as error:
        raise BuildError(f"{path} cannot be read as a manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise BuildError(
            f"{path} is not a manifest of schema version {SCHEMA_VERSION}; build it again with flashkda-build"
        )
    return manifest


def damaged_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the manifest's files that are missing from `folder` or whose sha256 differs."""
    damaged = []
    for artifact in manifest["artifacts"]:
        path = folder / artifact["file"]
        if not path.is_file() or sha256(path.read_bytes()) != artifact["sha256"]:
            damaged.append(artifact["file"])
    return damaged


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What a manifest says that another does not, one line each; empty for equal ones."""
    lines = [
        f"{key}: {ours.get(key)!r} against {theirs.get(key)!r}"
        for key in sorted((ours.keys() | theirs.keys()) - {"artifacts"})
        if ours.get(key) != theirs.get(key)
    ]
    mine, other = ({a["file"]: a for a in m["artifacts"]} for m in (ours, theirs))
    for file in sorted(mine.keys() | other.keys()):
        if file not in mine or file not in other:
            lines.append(f"{file}: only in the {'first' if file in mine else 'second'}")
        else:
            lines += [
                f"{file}: {key} {mine[file].get(key)!r} against {other[file].get(key)!r}"
                for key in sorted(mine[file].keys() | other[file].keys())
                if mine[file].get(key) != other[file].get(key)
            ]
    return lines
