"""Importing the package costs next to nothing and brings in nothing heavy."""

import os
import subprocess
import sys
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "runtime"
HEAVY = ("torch", "numpy", "cuda", "cutlass", "nvidia_cutlass_dsl", "flashkda_build", "click")
STANDARD = ("json", "ctypes", "dataclasses", "logging", "pathlib", "re", "typing", "hashlib", "threading")


def python(code: str, *options: str) -> str:
    # -S: what the environment's .pth files import is not ours.
    command = [sys.executable, "-I", "-S", *options, "-c", f"import sys; sys.path.insert(0, {str(RUNTIME)!r}); {code}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_import_brings_in_nothing_heavy() -> None:
    loaded = python(
        f"before = set(sys.modules); import flashkda; new = set(sys.modules) - before; "
        f"print([name for name in {HEAVY + STANDARD!r} if name in new])"
    )
    assert loaded == "[]"


def test_import_takes_under_ten_milliseconds() -> None:
    code = "import time; start = time.perf_counter(); import flashkda; print(time.perf_counter() - start)"
    assert min(float(python(code)) for _ in range(5)) < 0.010


def test_every_public_name_is_there_without_torch_or_cuda() -> None:
    code = (
        "import flashkda; names = [getattr(flashkda, name) for name in flashkda.__all__]; "
        "assert set(flashkda.__all__) <= set(dir(flashkda)); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert python(code) == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import flashkda\ntry:\n flashkda.nothing\nexcept AttributeError as error:\n print(error)"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(RUNTIME)!r})\n{code}"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "module 'flashkda' has no attribute 'nothing'"


def test_workspace_size_needs_no_torch_and_no_home(artifact_folder: Path) -> None:
    code = "import sys, flashkda; print(flashkda.workspace_size(16, 1), 'torch' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if key != "HOME"} | {"PYTHONPATH": str(RUNTIME)}
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, env=environment
    )
    assert result.stdout.split() == [str(2 * 13600), "False"]


def test_the_runtime_never_names_the_build_side_or_what_it_does_without() -> None:
    for file in (RUNTIME / "flashkda").glob("*.py"):
        lines = file.read_text().splitlines()
        imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
        assert not [line for line in imports if "flashkda_build" in line or "cutlass" in line], file
