"""The pinned compiler: which, with which options, in which environment."""

import importlib.metadata
import os
import sys
from pathlib import Path

from .architectures import Architecture
from .errors import BuildError
from .spec import KernelSpec

# One exact pin: another DSL version may schedule, contract or name things differently, and the released manifest
# promises bytes.
DSL = "nvidia-cutlass-dsl"
DSL_VERSION = "4.8.1"
# The default (cu12) flavour assembles with ptxas 12.9, whose cubins load from driver R525 on (sm_90a). The cu13
# flavour's ptxas would ask for R580 and gives these kernels nothing.
FLAVOUR = "cu12"
PTXAS_VERSION = "12.9.83"
#: Options of cute.compile. No line info: it writes source paths into the cubin, and bytes would depend on the folder.
#: A variant may add its own (KernelSpec.options).
OPTIONS = ("--opt-level", "3")


def toolchain(kernels: tuple[KernelSpec, ...]) -> dict[str, object]:
    """The manifest's `toolchain` object. options: those of every kernel, then what one has beyond."""
    own = {f"{spec.kernel} {arch}": " ".join(options) for spec in kernels for arch, options in spec.options.items()}
    return {
        "dsl": DSL,
        "dsl_version": DSL_VERSION,
        "flavour": FLAVOUR,
        "ptxas_version": PTXAS_VERSION,
        "options": [*OPTIONS, *(f"{kernel}: {options}" for kernel, options in own.items())],
    }


def require_dsl() -> None:
    """Raises BuildError unless the pinned DSL is installed. Does not import it."""
    advice = f"install the pinned one: pip install '{DSL}=={DSL_VERSION}' (or this package's `build` extra)"
    try:
        found = importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"{DSL} is not installed in {sys.prefix}; {advice}") from None
    if found != DSL_VERSION:
        raise BuildError(f"{DSL} is version {found}, the kernels are built with {DSL_VERSION}; {advice}")


def require_ptxas(label: str, cuda_version: int, ptxas_version: str | None) -> None:
    """Raises BuildError unless a cubin says that the pinned ptxas made it.

    cuda_version: e.g. 129 for 12.9. ptxas_version: e.g. "12.9.83", None where the cubin does not tell (sm_90a).
    """
    major, minor, _ = PTXAS_VERSION.split(".")
    if cuda_version != int(major) * 10 + int(minor) or ptxas_version not in (None, PTXAS_VERSION):
        found = ptxas_version or f"{cuda_version // 10}.{cuda_version % 10}"
        raise BuildError(
            f"{label} was assembled by ptxas {found}, the pin is {PTXAS_VERSION} ({DSL}'s {FLAVOUR} flavour). "
            f"Build in an environment without {DSL}'s other flavours (uninstall {DSL}-libs-cu13)."
        )


def worker_environment(arch: Architecture, dump: Path) -> dict[str, str]:
    """The environment of a compiling process: the caller's, but with every DSL setting ours.

    dump: folder where the DSL leaves cubins.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    env.update(
        CUTE_DSL_ARCH=arch.name,
        CUTE_DSL_KEEP="cubin",
        CUTE_DSL_DUMP_DIR=str(dump),
        CUTE_DSL_NO_CACHE="1",
        CUTE_DSL_DISABLE_FILE_CACHING="1",
        PYTHONHASHSEED="0",
        PYTHONDONTWRITEBYTECODE="1",
        # The kernels may have been made importable by sys.path alone (PEP 517 builds).
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
    )
    return env
