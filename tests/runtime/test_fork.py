"""Forked processes: a first use works, a use after an initialised parent says what is wrong."""

import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashkda
from flashkda import api, kernels
from flashkda.errors import DriverError

torch = pytest.importorskip("torch")


def in_child(work: Callable[[], str], seconds: float = 20) -> str:
    """What `work` returns in a forked process, or the exception it raises there."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}" if isinstance(error, DriverError) else traceback.format_exc()
        os.write(write_end, answer.encode()[:4096])
        os._exit(0)
    os.close(write_end)
    watchdog = threading.Timer(seconds, os.kill, (child, 9))
    watchdog.start()
    with os.fdopen(read_end) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    watchdog.cancel()
    return answer or "no answer"


@pytest.fixture
def call(on_cuda: Callable[..., Any], artifact_folder: Path, cuda: Any) -> Callable[[], str]:
    rows = {name: on_cuda(torch.zeros(1, 20, 2, 128, dtype=torch.bfloat16)) for name in ("q", "k", "v", "g", "out")}
    others = {"A_log": on_cuda(torch.zeros(2)), "dt_bias": on_cuda(torch.zeros(2, 128))}
    beta = on_cuda(torch.zeros(1, 20, 2, dtype=torch.bfloat16))

    def run() -> str:
        before = len(cuda.launches)
        flashkda.fwd(**rows, **others, beta=beta, scale=1.0, lower_bound=-5.0)
        return f"{len(cuda.launches) - before} launches"

    return run


def test_a_first_use_in_the_child_works(call: Callable[[], str]) -> None:
    assert in_child(call) == "2 launches"
    # Neither has the parent lost anything by it.
    assert call() == "2 launches"


def test_reading_the_manifest_before_the_fork_is_no_use_of_cuda(call: Callable[[], str]) -> None:
    flashkda.workspace_size(16, 1)
    assert in_child(call) == "2 launches"


@pytest.mark.parametrize("first", ["fwd", "preload"])
def test_a_use_after_fork_of_an_initialised_parent_is_a_clear_error(call: Callable[[], str], first: str) -> None:
    call() if first == "fwd" else flashkda.preload(0)
    for _ in range(2):
        answer = in_child(call)
        assert answer.startswith("DriverError: CUDA was in use when this process was forked") and "'spawn'" in answer
    assert in_child(lambda: str(flashkda.preload(0))).startswith("DriverError: CUDA was in use")
    # A child's child is no better off.
    assert in_child(lambda: in_child(call)).startswith("DriverError: CUDA was in use")
    assert call() == "2 launches"


def test_a_driver_that_another_library_initialised_before_the_fork_is_the_same_error(
    call: Callable[[], str], cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = type(cuda.launch_status)
    monkeypatch.setattr(cuda, "cuInit", lambda flags: (status.CUDA_ERROR_NOT_INITIALIZED,))
    with pytest.raises(DriverError, match="CUDA was in use when this process was forked"):
        call()


def test_locks_held_in_the_parent_do_not_stop_the_child(call: Callable[[], str]) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with api._lock, kernels._lock:
            held.set()
            release.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    try:
        assert in_child(call) == "2 launches"
    finally:
        release.set()
        holder.join()
