"""What a process of a server is told by its environment, and what it says unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from flashkda.cli import main
from flashkda.info import collect

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("served") / "artifacts"
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve_once.py")), str(folder)],
        check=False, capture_output=True, text=True, timeout=240,
        env={**os.environ, "FLASHKDA_ARTIFACTS": str(folder), "CUDA_VISIBLE_DEVICES": "7"},
    )  # fmt: skip


def test_nothing_but_the_folder_of_artifacts_is_asked_of_the_environment(
    served: subprocess.CompletedProcess[str],
) -> None:
    assert served.returncode == 0, served.stderr
    assert json.loads(served.stdout.splitlines()[-1]) == {
        "import": [],
        "fwd": ["FLASHKDA_ARTIFACTS"],
        "info": ["CUDA_VISIBLE_DEVICES", "FLASHKDA_ARTIFACTS"],
    }


def test_info_merely_repeats_the_visible_devices(
    artifact_folder: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for value in ("7", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        reports.append(collect())
        assert reports[-1]["system"].pop("CUDA_VISIBLE_DEVICES") == value
    assert reports[0] == reports[1]


def test_no_option_of_the_command_has_a_variable_behind_it() -> None:
    commands: list[click.Command] = [main, *main.commands.values()]
    assert len(commands) > 3
    for command in commands:
        assert command.context_settings.get("auto_envvar_prefix") is None
        assert [option.name for option in command.params if option.envvar is not None] == []


def test_import_calls_and_info_say_nothing_on_stderr(served: subprocess.CompletedProcess[str]) -> None:
    assert served.returncode == 0, served.stderr
    assert served.stderr == ""
    # All of stdout is info's, and the line of the process itself.
    assert served.stdout.startswith("flashkda ")
    assert not any(word in served.stdout for word in ("loaded ", "planned "))
