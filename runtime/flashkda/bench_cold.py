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
from flashkda.bench_together import run_together
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
    """Fresh processes of flashkda and of peers, one after another, and some of flashkda at once."""

    def __init__(self, device: int, processes: int, at_once: int, peers: Sequence[str] | None) -> None:
        """device: index among the visible ones; processes: of each but flash-linear-attention, which runs once.

        at_once: processes of flashkda, after its single ones, that are released together when all have their context;
        0 for none. peers: names, None for the usual ones. Raises `FlashKDAError` if one that is named is absent.
        """
        self._device = device
        #: Why peers are left out, by name: not installed, or a process of theirs failed or took longer than
        #: `_TIMEOUT_S`.
        self.left_out = _absent(USUAL_PEERS if peers is None else peers)
        if peers is not None:
            require_present(self.left_out)
        taking_part = [name for name in (USUAL_PEERS if peers is None else peers) if name not in self.left_out]
        self._runs = {by: 1 if by in _ONCE else processes for by in (OURS, *taking_part)}
        self._at_once = at_once
        # By whose, and how many ran at once.
        self._measured: dict[tuple[str, int | None], list[dict[str, float]]] = {}

    def run(self, tell: Callable[[str], None]) -> Iterator[str]:
        """Run them all; after each, and after those at once, how far it is ("3 of 28 processes").

        flash-linear-attention runs without its compile cache and on its own kernels. Writes the package's bytecode
        where it can. tell: takes a line about what is being done. Raises `FlashKDAError` if a process of flashkda's
        fails; a peer is left out then.
        """
        # An installer does this; a checkout, or a process that may not write bytecode, would compile it every time.
        compileall.compile_dir(Path(__file__).parent, quiet=2)
        done, total = 0, sum(self._runs.values()) + self._at_once
        tell(f"{total} fresh processes" + (f", {self._at_once} of them at once" if self._at_once else ""))
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
                    self._measured.pop((by, None), None)
                    tell(f"no peer {by}: {self.left_out[by]}")
                    total -= runs - number + 1
                    break
                done += 1
                self._measured.setdefault((by, None), []).append(steps)
                tell(f"{done} of {total}: {by}, {perf_counter() - before:.1f} s with Python, torch and a context")
                yield f"{done} of {total} processes"
            if by == OURS and self._at_once:
                before = perf_counter()
                self._measured[OURS, self._at_once] = run_at_once(self._at_once, self._device)
                done += self._at_once
                told = f"{done} of {total}: {by}, {self._at_once} at once"
                tell(f"{told}, {perf_counter() - before:.1f} s with Python, torch and contexts")
                yield f"{done} of {total} processes"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each that has run: `by`, `runs`, `at_once`, and milliseconds of each step.

        `at_once` is how many were released together, None for one after another; `total` is everything up to the first
        result.
        """
        return [_row(by, at_once, measured) for (by, at_once), measured in self._measured.items()]


def name_of(row: Mapping[str, Any]) -> str:
    """Whose a row is, as it is shown: "flashkda", or "flashkda, 8 at once"."""
    return str(row["by"]) if row["at_once"] is None else f"{row['by']}, {row['at_once']} at once"


def in_order(by_step: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Steps and what belongs to them as they are shown, however a report has them; unknown ones at the end."""
    known = [step for step in STEPS if step in by_step]
    return [(step, by_step[step]) for step in (*known, *(step for step in by_step if step not in STEPS))]


def _absent(peers: Sequence[str]) -> dict[str, str]:
    """Why peers cannot take part, by name, as far as can be told without importing what takes seconds."""
    found = [find_peer(name) for name in peers if name == ORIGINAL or find_spec(name) is None]
    return {peer.name: peer.reason for peer in found if isinstance(peer, Absent)}


def _row(by: str, at_once: int | None, measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    totals = [sum(ms for step, ms in steps.items() if step != AFTER) for steps in measured]
    by_step = {step: [steps[step] for steps in measured] for step in measured[0]} | {TOTAL: totals}
    summaries = {step: asdict(summarise(ms)) for step, ms in by_step.items()}
    return {"by": by, "runs": len(measured), "at_once": at_once, "ms": summaries}


def run_child(by: str, device: int) -> dict[str, float]:
    """One fresh process: milliseconds by step. Raises `FlashKDAError` with what it printed if it fails."""
    with tempfile.TemporaryDirectory() as cache:
        # FLA_FLASH_KDA: else it would hand the call on to flash_kda where there is one.
        environment = {**os.environ, "FLA_FLASH_KDA": "0", "TRITON_CACHE_DIR": cache}
        try:
            done = subprocess.run(
                _command(by, device), env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise FlashKDAError(f"the cold start of {by} took longer than {_TIMEOUT_S} s") from error
    if done.returncode:
        raise FlashKDAError(f"the cold start of {by} failed with code {done.returncode}: {done.stderr[-2000:]}")
    return _steps(done.stdout)


def run_at_once(count: int, device: int) -> list[dict[str, float]]:
    """So many fresh processes of flashkda: milliseconds by step of each.

    None takes its first step before all have imported torch and created their context, and none ends before all have
    taken their last. Raises `FlashKDAError` as `run_together` does.
    """
    what = f"the cold start of {OURS}, {count} at once"
    return [_steps(output) for output in run_together(_command(OURS, device), count, _TIMEOUT_S, what)]


def _command(by: str, device: int) -> list[str]:
    # As text: run from its file, the package's folder would be first on the module path.
    source = Path(__file__).with_name("bench_cold_child.py").read_text(encoding="utf-8")
    return [sys.executable, "-c", source, by, str(device)]


def _steps(output: str) -> dict[str, float]:
    steps: dict[str, float] = json.loads(output.splitlines()[-1])
    return steps
