"""From a CUDA context to the first result, in fresh processes; `import torch` and the context come before."""

import compileall
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from flashkda.bench_peers import FLA, ORIGINAL, OURS, USUAL_PEERS, Absent, find_peer, require_present
from flashkda.bench_stats import summarise
from flashkda.errors import FlashKDAError

#: No part of a cold start: the sum of its steps, and what comes after it.
TOTAL = "total"
AFTER = "second call"
#: All of them as they are shown.
STEPS = ("import", "manifest", "driver", "load", "first call", TOTAL, AFTER)

# The first call of fla compiles and tunes its kernels, which alone may take one minute and a half.
_ONCE = (FLA,)
_TIMEOUT_S = 180


class ColdStarts:
    """Fresh processes of flashkda and of peers, one after another."""

    def __init__(self, device: int, processes: int, peers: Sequence[str] | None) -> None:
        """device: index among the visible ones; processes: of each but flash-linear-attention, which runs once.

        peers: names, None for the usual ones. Raises `FlashKDAError` if one that is named is absent.
        """
        self._device = device
        #: Why peers are left out, by name: not installed, or a process of theirs failed or took longer than
        #: `_TIMEOUT_S`.
        self.left_out = _absent(USUAL_PEERS if peers is None else peers)
        if peers is not None:
            require_present(self.left_out)
        taking_part = [name for name in (USUAL_PEERS if peers is None else peers) if name not in self.left_out]
        self._runs = {by: 1 if by in _ONCE else processes for by in (OURS, *taking_part)}
        self._measured: dict[str, list[dict[str, float]]] = {}

    def run(self, tell: Callable[[str], None]) -> Iterator[str]:
        """Run them all; after each, how far it is ("3 of 21 processes").

        flash-linear-attention runs without its compile cache and on its own kernels. Writes the package's bytecode
        where it can. tell: takes a line about what is being done. Raises `FlashKDAError` if a process of flashkda's
        fails; a peer is left out then.
        """
        # An installer does this; a checkout, or a process that may not write bytecode, would compile it every time.
        compileall.compile_dir(Path(__file__).parent, quiet=2)
        done, total = 0, sum(self._runs.values())
        tell(f"{total} fresh processes")
        for by, runs in self._runs.items():
            for number in range(1, runs + 1):
                before = perf_counter()
                try:
                    steps = run_child(by, self._device)
                except FlashKDAError as error:
                    if by == OURS:
                        raise
                    # The last line of a traceback is the one that says what happened.
                    self.left_out[by] = str(error).rstrip().splitlines()[-1]
                    self._measured.pop(by, None)
                    tell(f"no peer {by}: {self.left_out[by]}")
                    total -= runs - number + 1
                    break
                done += 1
                self._measured.setdefault(by, []).append(steps)
                tell(f"{done} of {total}: {by}, {perf_counter() - before:.1f} s with Python, torch and a context")
                yield f"{done} of {total} processes"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each that has run: `by`, `runs`, and milliseconds of each step.

        `total` is everything up to the first result.
        """
        return [_row(by, measured) for by, measured in self._measured.items()]


def in_order(by_step: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Steps and what belongs to them as they are shown, however a report has them; unknown ones at the end."""
    known = [step for step in STEPS if step in by_step]
    return [(step, by_step[step]) for step in (*known, *(step for step in by_step if step not in STEPS))]


def _absent(peers: Sequence[str]) -> dict[str, str]:
    """Why peers cannot take part, by name, as far as can be told without importing what takes seconds."""
    found = [find_peer(name) for name in peers if name == ORIGINAL or find_spec(name) is None]
    return {peer.name: peer.reason for peer in found if isinstance(peer, Absent)}


def _row(by: str, measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    totals = [sum(ms for step, ms in steps.items() if step != AFTER) for steps in measured]
    by_step = {step: [steps[step] for steps in measured] for step in measured[0]} | {TOTAL: totals}
    return {"by": by, "runs": len(measured), "ms": {step: asdict(summarise(ms)) for step, ms in by_step.items()}}


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
