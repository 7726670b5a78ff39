"""The commit in a report's header: of the checkout that the package lies in, whoever owns it."""

import subprocess
from pathlib import Path
from shutil import which

import pytest

from flashkda.bench_commit import checkout_commit

pytestmark = pytest.mark.skipif(which("git") is None, reason="there is no git here")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A module in a checkout with one commit, in which there are also a tracked measurement and a text."""
    folder = tmp_path / "checkout"
    files = [folder / name for name in ("runtime/package/module.py", "build_kernels/measurements/gpu.json", "text.md")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("as committed\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return files[0]


def test_it_is_the_commit_of_the_checkout_in_short(module: Path) -> None:
    assert checkout_commit(module) == git(module.parent, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize("name", ["runtime/package/module.py", "text.md"])
def test_a_changed_file_makes_it_dirty(module: Path, name: str) -> None:
    (module.parents[2] / name).write_text("changed\n")
    assert checkout_commit(module) == git(module.parent, "rev-parse", "HEAD")[:12] + "-dirty"


def test_new_measurements_and_untracked_files_do_not_make_it_dirty(module: Path) -> None:
    (module.parents[2] / "build_kernels/measurements/gpu.json").write_text("changed\n")
    (module.parents[2] / "artifacts").mkdir()
    (module.parents[2] / "artifacts/kernel.cubin").write_text("built\n")
    assert checkout_commit(module) == git(module.parent, "rev-parse", "HEAD")[:12]


def test_a_checkout_of_another_users_has_one_too(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(module.parent, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(subprocess.CalledProcessError):
        git(module.parent, "rev-parse", "HEAD")
    assert checkout_commit(module) == commit[:12]


def test_there_is_none_for_what_is_not_tracked(module: Path, tmp_path: Path) -> None:
    untracked = module.with_name("untracked.py")
    outside = tmp_path / "module.py"
    for file in (untracked, outside):
        file.write_text("installed\n")
        assert checkout_commit(file) is None


def test_there_is_none_without_git(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert checkout_commit(module) is None
