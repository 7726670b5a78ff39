"""From a CUDA context to the first result, in fresh processes; `import torch` and the context come before."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashkda.bench_peers import FLA, ORIGINAL, Absent, find_peer
from flashkda.bench_stats import summarise
from flashkda.errors import FlashKDAError

_RUNS = 10
_TIMEOUT_S = 600
_AFTER = "second call"


def cold_rows(device: int, peers: Sequence[str]) -> list[dict[str, Any]]:
    """A row for flashkda and for each peer that can be imported: `by`, `runs`, and milliseconds of each step in order.

    `total` is everything up to the first result. flash-linear-attention runs twice only, each time without its compile
    cache. Raises `FlashKDAError` if a process fails.
    """
    rows = [_row("flashkda", device, _RUNS)]
    if ORIGINAL in peers and not isinstance(find_peer(ORIGINAL), Absent):
        rows.append(_row(ORIGINAL, device, _RUNS))
    if FLA in peers and find_spec(FLA) is not None:
        rows.append(_row(FLA, device, 2))
    return rows


def _row(by: str, device: int, runs: int) -> dict[str, Any]:
    measured = [run_child(by, device) for _ in range(runs)]
    for steps in measured:
        steps["total"] = sum(ms for step, ms in steps.items() if step != _AFTER)
    return {
        "by": by,
        "runs": runs,
        "ms": {step: asdict(summarise([steps[step] for steps in measured])) for step in measured[0]},
    }


def run_child(by: str, device: int) -> dict[str, float]:
    """One fresh process: milliseconds by step. Raises `FlashKDAError` with what it printed if it fails."""
    source = Path(__file__).with_name("bench_cold_child.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "FLA_FLASH_KDA": "0", "TRITON_CACHE_DIR": cache}
        # As text: run from its file, the package's folder would be first on the module path.
        command = [sys.executable, "-c", source, by, str(device)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise FlashKDAError(f"the cold start of {by} failed with code {done.returncode}: {done.stderr[-2000:]}")
    steps: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return steps
