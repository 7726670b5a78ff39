"""Answering to `flash_kda`: what is found under the name, and what happens where there is another."""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

import flashkda
from flashkda import AliasError
from flashkda.alias import FOLDER
from flashkda.bench_peers import Absent, find_peer
from flashkda.cli import main

RUNTIME = Path(__file__).parents[2] / "runtime"


@pytest.fixture(autouse=True)
def no_flash_kda() -> Iterator[None]:
    if find_spec("flash_kda") is not None:
        pytest.skip("a flash_kda is installed here")
    path = list(sys.path)
    yield
    # Not by monkeypatch, which would bring back the path as it was when something was put in front of it.
    sys.path[:] = path
    sys.modules.pop("flash_kda", None)


@pytest.fixture
def install_original(tmp_path: Path) -> Callable[[], Path]:
    def install() -> Path:
        package = tmp_path / "site" / "flash_kda"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("def fwd(): ...\n")
        sys.path.insert(0, str(package.parent))
        return package

    return install


def python(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """A fresh process with the package on its module path, and `path` before that."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(RUNTIME))))}
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=60)


def test_nothing_answers_until_asked() -> None:
    assert find_spec("flash_kda") is None


def test_the_name_is_found_and_is_this_package() -> None:
    flashkda.install_as_flash_kda()
    found = find_spec("flash_kda")
    assert found is not None and found.has_location
    import flash_kda

    assert flash_kda.fwd is flashkda.fwd
    assert flash_kda.get_workspace_size is flashkda.workspace_size


def test_installing_twice_changes_nothing() -> None:
    flashkda.install_as_flash_kda()
    path, module = list(sys.path), sys.modules["flash_kda"]
    flashkda.install_as_flash_kda()
    assert sys.path == path and sys.modules["flash_kda"] is module


def test_every_call_of_the_original_is_one_of_ours() -> None:
    flashkda.install_as_flash_kda()
    import flash_kda

    parameters = list(inspect.signature(flash_kda.fwd).parameters.values())
    empty = inspect.Parameter.empty
    assert [(one.name, one.default) for one in parameters[:13]] == [
        *((name, empty) for name in ("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound")),
        ("initial_state", None), ("final_state", None), ("cu_seqlens", None),
    ]  # fmt: skip
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters[:13])
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is None for one in parameters[13:])
    parameters = list(inspect.signature(flash_kda.get_workspace_size).parameters.values())
    assert [(one.name, one.default) for one in parameters] == [("T_total", empty), ("H", empty), ("N", 1)]


def test_an_installed_original_is_refused_and_left_usable(install_original: Callable[[], Path]) -> None:
    package = install_original()
    with pytest.raises(AliasError, match=str(package / "__init__.py")):
        flashkda.install_as_flash_kda()
    assert FOLDER not in sys.path
    assert Path(importlib.import_module("flash_kda").__file__ or "").parent == package


def test_an_imported_original_is_refused(install_original: Callable[[], Path]) -> None:
    package = install_original()
    importlib.import_module("flash_kda")
    sys.path.remove(str(package.parent))
    with pytest.raises(AliasError, match=f"imported already, from {package}"):
        flashkda.install_as_flash_kda()


def test_a_module_of_no_file_under_the_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_kda", ModuleType("flash_kda"))
    with pytest.raises(AliasError, match="imported already"):
        flashkda.install_as_flash_kda()


def test_an_original_that_appears_after_the_alias_is_refused(install_original: Callable[[], Path]) -> None:
    flashkda.install_as_flash_kda()
    install_original()
    with pytest.raises(AliasError, match="another flash_kda is installed"):
        flashkda.install_as_flash_kda()


def test_a_finder_of_an_editable_installation_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> object:
            if name != "flash_kda":
                return None
            return importlib.util.spec_from_file_location(name, tmp_path / "checkout.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    with pytest.raises(AliasError, match=r"checkout\.py"):
        flashkda.install_as_flash_kda()


def test_what_imports_pass_over_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldFinder:
        # Python 3.11 still asks this instead of find_spec.
        @staticmethod
        def find_module(name: str, path: object) -> None:
            return None

    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "meta_path", [OldFinder, *sys.meta_path])
    sys.path[:0] = ["", None, tmp_path]  # type: ignore[list-item]
    flashkda.install_as_flash_kda()
    assert importlib.import_module("flash_kda").fwd is flashkda.fwd


def test_a_mere_folder_of_that_name_is_no_original(tmp_path: Path) -> None:
    (tmp_path / "flash_kda").mkdir()
    sys.path.insert(0, str(tmp_path))
    flashkda.install_as_flash_kda()
    assert importlib.import_module("flash_kda").fwd is flashkda.fwd


def test_the_command_names_what_to_put_on_pythonpath() -> None:
    shown = CliRunner().invoke(main, ["alias"])
    assert shown.exit_code == 0
    code = "from importlib.util import find_spec; print(find_spec('flash_kda').has_location); import flash_kda; "
    done = python("-c", code + "print(flash_kda.fwd.__module__)", path=shown.stdout.strip())
    assert done.stdout.split() == ["True", "flashkda.api"], done.stderr


def test_the_command_fails_beside_an_original(install_original: Callable[[], Path]) -> None:
    package = install_original()
    shown = CliRunner().invoke(main, ["alias"])
    assert shown.exit_code == 1 and str(package) in shown.output


def test_pythonpath_beside_an_original_is_refused_when_imported(install_original: Callable[[], Path]) -> None:
    package = install_original()
    done = python("-c", "import flash_kda", path=os.pathsep.join((FOLDER, str(package.parent))))
    assert done.returncode == 1 and f"AliasError: another flash_kda is installed, at {package}" in done.stderr


def test_pythonpath_and_the_call_go_together(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(FOLDER)
    code = "import flashkda; flashkda.install_as_flash_kda(); import flash_kda; flashkda.install_as_flash_kda()"
    done = python("-c", code, path=str(link))
    assert done.returncode == 0, done.stderr


def test_a_spawned_child_has_the_name_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "def child():\n"
        "    import flash_kda\n"
        "    print(flash_kda.fwd.__module__)\n"
        "if __name__ == '__main__':\n"
        "    import flashkda\n"
        "    flashkda.install_as_flash_kda()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    done = python(str(script))
    assert done.stdout.strip() == "flashkda.api", done.stderr


def test_the_name_alone_loads_no_torch_and_no_cuda() -> None:
    done = python(
        "-c",
        "import flashkda, sys; flashkda.install_as_flash_kda(); import flash_kda; "
        "print([name for name in ('torch', 'numpy', 'cuda') if name in sys.modules])",
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_benchmark_does_not_take_it_for_the_original() -> None:
    flashkda.install_as_flash_kda()
    peer = find_peer("flash_kda")
    assert isinstance(peer, Absent) and "another name" in peer.reason
