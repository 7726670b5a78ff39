"""One variant -> cubin bytes; also the process that does it for one architecture.

The DSL reads its target from CUTE_DSL_ARCH at import, so each architecture has its own process, started by build.py.
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from .errors import BuildError
from .spec import KernelSpec, load_kernels
from .toolchain import OPTIONS


def compile_kernel(spec: KernelSpec) -> bytes:
    """The cubin of `spec` for the architecture in CUTE_DSL_ARCH. Needs toolchain.worker_environment."""
    import cutlass.cute as cute

    host, arguments = importlib.import_module(spec.module).trace(spec)
    options = (*OPTIONS, *spec.options_for(os.environ["CUTE_DSL_ARCH"]))
    cubin = cute.compile(host, *arguments, options=" ".join(options)).__cubin__
    if not isinstance(cubin, bytes):
        raise BuildError(
            f"the DSL returned no cubin for {spec.label} (CUTE_DSL_KEEP and CUTE_DSL_DUMP_DIR must be set)"
        )
    return cubin


def main(package: str, folder: str) -> int:
    """Compiles every variant of `package` into `folder`; one JSON line on stdout for each: seconds, or error."""
    arch = os.environ["CUTE_DSL_ARCH"]
    # Anything that the DSL prints must not mix with the lines that build.py parses.
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for spec in load_kernels(package):
        start = time.monotonic()
        try:
            cubin = compile_kernel(spec)
        except Exception:
            print(json.dumps({"label": spec.label, "error": traceback.format_exc()}), file=report)
            return 1
        Path(folder, spec.file_name(arch)).write_bytes(cubin)
        print(json.dumps({"label": spec.label, "seconds": round(time.monotonic() - start, 2)}), file=report)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
