"""memcheck, racecheck, synccheck and initcheck find nothing in the spread of small calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SPREAD = Path(__file__).with_name("sanitizer_spread.py")
#: With the arguments of the spread, whose docstring says why.
TOOLS = {"memcheck": (), "racecheck": (), "synccheck": (), "initcheck": ("--well-formed",)}
SECONDS = 300


@pytest.fixture(scope="module")
def started(device, tmp_path_factory) -> Iterator[dict[str, tuple[subprocess.Popen, Path]]]:
    """Each tool's process and what it prints; all at once, so that they take the time of the slowest."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    folder = tmp_path_factory.mktemp("sanitizers")
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    processes = {}
    try:
        for tool, more in TOOLS.items():
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(SPREAD), *more]
            # To a file: a full pipe that nobody reads yet would stop it.
            log = folder / f"{tool}.txt"
            with log.open("w") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            processes[tool] = process, log
        yield processes
    finally:
        for process, _ in processes.values():
            if process.poll() is None:
                # The tool and what it runs.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing(tool: str, started) -> None:
    process, log = started[tool]
    try:
        code = process.wait(SECONDS)
    finally:
        printed = log.read_text(errors="replace")
        print(printed[-8000:])
    if code != 0 and "Device not supported" in printed:
        pytest.skip("compute-sanitizer does not support this device, or not in this sandbox")
    assert code == 0
    # That it was the tool's run, and not the spread's alone.
    assert "SUMMARY: " in printed
