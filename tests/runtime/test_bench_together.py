"""Processes that `flashkda bench` releases together: they wait, errors say whose they are, and none stays."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from flashkda import bench_together
from flashkda.bench_together import READY, run_together
from flashkda.errors import FlashKDAError

# `log` adds a line for all to see, and `mine` is this process's place among those that came so far.
PRELUDE = """
import os, sys, time
def log(word):
    with open(sys.argv[1], "ab", buffering=0) as file:
        file.write(word.encode() + b"\\n")
def logged():
    return open(sys.argv[1]).read().split()
def await_logged(word, count):
    while logged().count(word) < count:
        time.sleep(0.01)
def take_place():
    for place in range(100):
        try:
            os.close(os.open(f"{sys.argv[1]}.{place}", os.O_CREAT | os.O_EXCL))
            return place
        except FileExistsError:
            pass
def wait():
    print(sys.argv[2], flush=True)
    if not sys.stdin.readline():
        sys.exit(3)
mine = take_place()
"""


class Group:
    """Runs made-up processes together, and keeps what was started."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, count: int, text: str, timeout_s: float = 60) -> list[str]:
        self.log.touch()
        program = PRELUDE + textwrap.dedent(text)
        return run_together([sys.executable, "-c", program, str(self.log)], count, timeout_s, "the made-up")

    @property
    def words(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Group(tmp_path / "log")
    popen = subprocess.Popen

    def start(*arguments: Any, **named: Any) -> Any:
        made.started.append(popen(*arguments, **named))
        return made.started[-1]

    monkeypatch.setattr(bench_together.subprocess, "Popen", start)
    yield made
    assert made.started
    for process in made.started:
        assert process.returncode is not None
        assert all(stream.closed for stream in (process.stdin, process.stdout, process.stderr))
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_none_begins_before_all_are_ready_and_none_ends_before_all_have_measured(group: Group) -> None:
    printed = group.run(
        4,
        """
        print("a library's own line")
        time.sleep(0.5 * (mine == 3))
        log("ready")
        wait()
        log("begun")
        time.sleep(0.5 * (mine == 1))
        log("measured")
        print("result", mine)
        wait()
        log("ended")
        """,
    )
    words = group.words
    assert [words.count(word) for word in ("ready", "begun", "measured", "ended")] == [4] * 4
    assert words[:4] == ["ready"] * 4 and words[-4:] == ["ended"] * 4
    assert sorted(printed) == [f"a library's own line\nresult {place}" for place in range(4)]
    assert [process.returncode for process in group.started] == [0] * 4


@pytest.mark.parametrize(
    "failing",
    [
        "sys.exit('it is broken')",  # Before it is ready,
        "wait(); sys.exit('it is broken')",  # while it measures,
        "wait(); wait(); sys.exit('it is broken')",  # and at its end.
    ],
)
def test_one_that_fails_ends_the_others_and_says_what_it_said(group: Group, failing: str) -> None:
    before = time.monotonic()
    with pytest.raises(FlashKDAError) as failed:
        group.run(
            3,
            f"""
            if mine == 1:
                {failing}
            wait()
            wait()
            time.sleep(60)
            """,
        )
    assert re.fullmatch(r"the made-up: process [123] failed with code 1: it is broken\n", str(failed.value))
    assert time.monotonic() - before < 30
    number = int(str(failed.value).split()[3])
    assert group.started[number - 1].returncode == 1


@pytest.mark.parametrize("before", ["", "wait()"])
def test_one_that_ends_before_its_time_is_a_failure(group: Group, before: str) -> None:
    with pytest.raises(FlashKDAError, match="failed with code 0"):
        group.run(2, f"{before}\nif mine: sys.exit(0)\nwait()\nwait()")


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("if mine: time.sleep(60)\nwait()", "not ready"),
        ("wait()\nif mine: time.sleep(60)\nwait()", "without a result"),
        ("wait()\nwait()\nif mine: time.sleep(60)", "not at its end"),
    ],
)
def test_those_that_do_not_answer_in_time_are_named(group: Group, text: str, late: str) -> None:
    with pytest.raises(FlashKDAError) as failed:
        group.run(3, text, timeout_s=2.5)
    said = re.fullmatch(
        rf"the made-up, took longer than 2\.5 s: processes ([123]), ([123]) of 3 {late}", str(failed.value)
    )
    assert said is not None, failed.value
    killed = [number for number, one in enumerate(group.started, 1) if one.returncode == -signal.SIGKILL]
    assert {int(number) for number in said.groups()} <= set(killed)


def test_one_that_does_not_answer_is_named_alone(group: Group) -> None:
    with pytest.raises(FlashKDAError, match=r": process [123] of 3 not ready$"):
        group.run(3, "if mine == 2: time.sleep(60)\nwait()", timeout_s=2.5)


@pytest.mark.parametrize("waiting", ["", "wait(); "])
def test_an_interrupt_leaves_no_process(group: Group, waiting: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        group.run(
            3,
            f"""
            import signal
            {waiting}log("there")
            await_logged("there", 3)
            if mine == 0:
                os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
            """,
        )
    assert [process.returncode for process in group.started] == [-signal.SIGKILL] * 3


def test_what_cannot_be_started_leaves_no_process(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    start = bench_together.subprocess.Popen

    def start_two(*arguments: Any, **named: Any) -> Any:
        if len(group.started) == 2:
            raise BlockingIOError("no more processes")
        return start(*arguments, **named)

    monkeypatch.setattr(bench_together.subprocess, "Popen", start_two)
    with pytest.raises(BlockingIOError):
        group.run(3, "wait()")


def test_processes_whose_parent_is_killed_end_by_themselves(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    # Two wait by then, and one does not yet.
    child = PRELUDE + "import atexit; atexit.register(log, 'gone')\nlog('there')\nif mine == 0: time.sleep(2)\nwait()"
    parent = f"""
import sys
sys.path.insert(0, {str(Path(bench_together.__file__).parents[1])!r})
from flashkda.bench_together import run_together
run_together([sys.executable, "-c", {child!r}, {str(log)!r}], 3, 60, "the made-up")
"""
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        while log.read_text().split().count("there") < 3 and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    deadline = time.monotonic() + 30
    while log.read_text().split().count("gone") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_much_that_is_printed_blocks_nobody(group: Group) -> None:
    printed = group.run(
        2, "sys.stderr.write('x' * 300_000)\nprint('y' * 300_000)\nwait()\nsys.stderr.write('x' * 300_000)\nwait()"
    )
    assert printed == ["y" * 300_000] * 2 and READY not in printed[0]
