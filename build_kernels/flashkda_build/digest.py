"""The source digest: one hash over everything that the cubins' bytes depend on."""

import hashlib
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

from . import compile as compile_module
from .spec import load_kernels
from .toolchain import toolchain


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def source_digest(package: str) -> str:
    """sha256 hex over the kernel package's sources, its variant table, the compiling code and the toolchain.

    The architectures are not in it: a set built for fewer of them has the same digest.
    """
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    root = Path(found.submodule_search_locations[0])
    sources = {path.relative_to(root).as_posix(): sha256(path.read_bytes()) for path in sorted(root.rglob("*.py"))}
    assert compile_module.__file__
    parts = {
        "sources": sources,
        "compile": sha256(Path(compile_module.__file__).read_bytes()),
        "kernels": [asdict(spec) for spec in load_kernels(package)],
        "toolchain": toolchain(load_kernels(package)),
    }
    return sha256(json.dumps(parts, sort_keys=True).encode())
