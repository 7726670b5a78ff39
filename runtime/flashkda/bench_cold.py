"""From a CUDA context to the first result, in fresh processes; `import torch` and the context come before."""

import compileall
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashkda.bench_peers import FLA, ORIGINAL, Absent, find_peer
from flashkda.bench_stats import summarise
from flashkda.errors import FlashKDAError

#: Steps that are no part of a cold start: what comes after, and the sum of those before.
AFTER = "second call"
TOTAL = "total"

# The first call of fla compiles and tunes its kernels, which alone may take one minute and a half.
_RUNS = {"flashkda": 10, ORIGINAL: 10, FLA: 1}
_TIMEOUT_S = 180


def cold_rows(
    device: int, peers: Sequence[str], tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for flashkda and for each peer: `by`, `runs`, and milliseconds of each step in order.

    `total` is everything up to the first result. flash-linear-attention runs once, without its compile cache and on its
    own kernels. Writes the package's bytecode where it can. Returns the rows, and why peers are left out, by name: not
    installed, or a process of theirs failed or took longer than `_TIMEOUT_S`. tell: takes a line about what is being
    done. Raises `FlashKDAError` if a process of flashkda's fails.
    """
    # An installer does this; a checkout, or a process that may not write bytecode, would compile the source every time.
    compileall.compile_dir(Path(__file__).parent, quiet=2)
    tell("fresh processes: flashkda")
    rows, left_out = [_row("flashkda", device)], {}
    for name in peers:
        tell(f"fresh processes: {name}")
        try:
            _require_peer(name)
            rows.append(_row(name, device))
        except FlashKDAError as error:
            # The last line of a traceback is the one that says what happened.
            left_out[name] = str(error).rstrip().splitlines()[-1]
    return rows, left_out


def _require_peer(name: str) -> None:
    # Importing fla takes seconds, and its process says as well what is wrong with it.
    found = find_peer(name) if name == ORIGINAL or find_spec(name) is None else None
    if isinstance(found, Absent):
        raise FlashKDAError(found.reason)


def _row(by: str, device: int) -> dict[str, Any]:
    measured = [run_child(by, device) for _ in range(_RUNS[by])]
    for steps in measured:
        steps[TOTAL] = sum(ms for step, ms in steps.items() if step != AFTER)
    return {
        "by": by,
        "runs": len(measured),
        "ms": {step: asdict(summarise([steps[step] for steps in measured])) for step in measured[0]},
    }


def run_child(by: str, device: int) -> dict[str, float]:
    """One fresh process: milliseconds by step. Raises `FlashKDAError` with what it printed if it fails."""
    source = Path(__file__).with_name("bench_cold_child.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as cache:
        # FLA_FLASH_KDA: else it would hand the call on to flash_kda where there is one.
        environment = {**os.environ, "FLA_FLASH_KDA": "0", "TRITON_CACHE_DIR": cache}
        # As text: run from its file, the package's folder would be first on the module path.
        command = [sys.executable, "-c", source, by, str(device)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise FlashKDAError(f"the cold start of {by} took longer than {_TIMEOUT_S} s") from error
    if done.returncode:
        raise FlashKDAError(f"the cold start of {by} failed with code {done.returncode}: {done.stderr[-2000:]}")
    steps: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return steps
