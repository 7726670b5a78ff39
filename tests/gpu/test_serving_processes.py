"""What only a fresh process shows: first uses, captures without a warm-up, forks, and many processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

# Arguments of one call, deterministic, with the digest of what it wrote.
PRELUDE = """
import hashlib, os, sys
import flashkda

def make(device="cuda"):
    import torch
    generator = torch.Generator().manual_seed(5)
    def normal(*size):
        return torch.randn(*size, generator=generator).to(torch.bfloat16).to(device)
    shape = (1, 200, 4, 128)
    given = {name: normal(*shape) for name in "qkvg"} | {"beta": normal(*shape[:3])}
    given |= {"A_log": torch.rand(4, generator=generator).to(device)}
    given |= {"dt_bias": torch.rand(4, 128, generator=generator).to(device)}
    given |= {"cu_seqlens": torch.tensor([0, 77, 77, 200]).to(device)}
    given |= {"initial_state": normal(3, 4, 128, 128), "scale": 128**-0.5, "lower_bound": -5.0}
    given["out"] = torch.zeros_like(given["v"])
    given["final_state"] = torch.zeros(3, 4, 128, 128, device=device)
    return given

def digest(given):
    import torch
    written = [given["out"].cpu().view(torch.int16), given["final_state"].cpu()]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in written)).hexdigest()

def in_child(work):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__module__}.{type(error).__name__}: {error}"
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer

def run():
    given = make()
    flashkda.fwd(**given)
    return digest(given)
"""


def start(code: str, **changes) -> subprocess.Popen:
    """A fresh interpreter that runs `code` after the prelude."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= changes.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **changes,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> list[str]:
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    return stdout.splitlines()


@pytest.fixture(scope="module")
def expected(device) -> str:
    """The digest of a plain first call in a process of its own."""
    (found,) = finish(start("print(run())"))
    return found


def test_after_preload_the_first_call_may_be_captured(expected: str) -> None:
    code = """
    import torch
    flashkda.preload()
    given = make()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashkda.fwd(**given)
    graph.replay()
    print(digest(given))
    """
    assert finish(start(code)) == [expected]


def test_preload_without_torch_serves_torch_later(expected: str) -> None:
    code = """
    flashkda.preload(0)
    assert "torch" not in sys.modules
    print(run())
    """
    assert finish(start(code)) == [expected]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
def test_a_first_use_inside_a_capture_asks_for_preload_and_works_after_it(compiled: bool, expected: str) -> None:
    code = f"""
    import torch
    call = flashkda.fwd
    if {compiled}:
        from flashkda.torch_operator import fwd as call
    given = make()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call(**given)
    except flashkda.DriverError as error:
        print(error)
    flashkda.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**given)
    graph.replay()
    print(digest(given))
    """
    refusal, found = finish(start(code))
    assert "flashkda.preload(0)" in refusal and "captured into a CUDA graph" in refusal
    assert found == expected


def test_bindings_with_the_per_thread_default_stream_still_use_torchs(expected: str) -> None:
    code = """
    import torch
    given = make()
    v = given["v"].clone()
    flashkda.fwd(**given)
    given["v"].fill_(7.0)
    given["out"].zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    given["v"].copy_(v)
    flashkda.fwd(**given)
    print(digest(given))
    """
    assert finish(start(code, env={"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1"})) == [expected]


def test_import_in_the_parent_and_first_use_in_the_children(expected: str) -> None:
    code = """
    import torch
    import flashkda.torch_operator
    flashkda.fwd, flashkda.prefill, flashkda.workspace_size(16, 1)
    print(in_child(run))
    print(in_child(run))
    print(run())
    """
    assert finish(start(code)) == [expected] * 3


@pytest.mark.parametrize("first", ["flashkda.preload(0)", "run()", "make()"], ids=["preload", "fwd", "torch_alone"])
def test_use_after_fork_of_an_initialised_parent_is_a_clear_error(first: str, expected: str) -> None:
    code = f"""
    given = make()
    {first}
    def again():
        flashkda.fwd(**given)
        return "no error"
    print(in_child(again))
    print(in_child(lambda: str(flashkda.preload(0))))
    flashkda.fwd(**given)
    print(digest(given))
    """
    call, preload, parent = finish(start(code))
    for answer in (call, preload):
        assert answer.startswith("flashkda.errors.DriverError: CUDA was in use when this process was forked")
    assert parent == expected


def listing(*folders: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(file), file.stat().st_size, file.stat().st_mtime_ns) for folder in folders for file in folder.rglob("*")
    )


def test_eight_processes_at_once_have_the_same_bits_and_write_no_file(expected: str, tmp_path: Path) -> None:
    import flashkda

    private = [tmp_path / name for name in ("home", "tmp", "cwd", "cache")]
    for folder in private:
        folder.mkdir()
    home, temporary, working, cache = private
    package = [Path(flashkda.__file__).parent, Path(os.environ.get("FLASHKDA_ARTIFACTS", flashkda.__file__))]
    environment = {"HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache)}
    finish(start("digest(make())", cwd=working, env=environment))  # what torch and the driver leave by themselves
    before = listing(tmp_path, *package)
    processes = [start("print(run())", cwd=working, env=environment) for _ in range(8)]
    assert [finish(process) for process in processes] == [[expected]] * 8
    assert listing(tmp_path, *package) == before
