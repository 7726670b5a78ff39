"""`flashkda info` tells what is installed, what each device gets, and what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashkda.cli import main
from flashkda.errors import DriverError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_info_shows_what_each_device_gets_and_why_not(artifact_folder: Path, cuda: Any) -> None:
    cuda.devices = [{"major": 9, "minor": 0, "sm_count": 132}, {"major": 12, "minor": 0, "sm_count": 170}]
    result = run("info", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["artifacts"]["folder"] == str(artifact_folder)
    assert report["artifacts"]["overridden_by"] == "FLASHKDA_ARTIFACTS"
    assert report["driver"] == {"cuda": "12.9", "version": 12090}
    first, second = report["devices"]
    assert [kernel["file"] for kernel in first["kernels"]] == [
        "prepare.flashkda.sm_90a.cubin",
        *(f"recurrence.flashkda.bv{bv}.sm_90a.cubin" for bv in (32, 64, 128)),
    ]
    assert all(kernel["file"] is None for kernel in second["kernels"])
    assert "not 12.0" in second["kernels"][0]["refused"]["prepare.flashkda.sm_90a.cubin"][0]


def test_info_for_a_person_says_the_same(artifact_folder: Path, cuda: Any) -> None:
    (artifact_folder / "stranger.cubin").write_bytes(b"?")
    result = run("info")
    assert result.exit_code == 0
    for part in (
        "flashkda 0.1.0",
        "set by FLASHKDA_ARTIFACTS",
        "ptxas 12.9.86",
        "device 0: Made-up GPU, compute capability 9.0, 132 SMs",
        "recurrence bv 64: recurrence.flashkda.bv64.sm_90a.cubin",
        "never loaded: stranger.cubin",
    ):
        assert part in result.stdout


def test_info_without_a_driver_is_no_failure(artifact_folder: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(flags: int) -> Any:
        raise RuntimeError("libcuda not found")

    monkeypatch.setattr(cuda, "cuInit", no_driver)
    result = run("info")
    assert result.exit_code == 0
    assert "libcuda not found" in result.stdout and "devices: none" in result.stdout


def test_info_fails_on_a_changed_or_missing_artifact(artifact_folder: Path, cuda: Any) -> None:
    (artifact_folder / "prepare.flashkda.sm_90a.cubin").write_bytes(b"?")
    result = run("info")
    assert result.exit_code == 1
    assert "PROBLEM: prepare.flashkda.sm_90a.cubin" in result.stdout
    (artifact_folder / "manifest.json").unlink()
    result = run("info", "--json")
    assert result.exit_code == 1
    assert "manifest.json is missing" in json.loads(result.stdout)["artifacts"]["problems"][0]


def test_selftest_passes_its_options_and_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    seen: dict[str, Any] = {}
    module = ModuleType("flashkda.selftest")

    def fake_run(**options: Any) -> int:
        seen.update(options)
        if options["device"] == 9:
            raise DriverError("no such device")
        return 3

    module.run = fake_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashkda.selftest", module)
    assert run("selftest", "--device", "1", "--json").exit_code == 3
    assert seen == {"device": 1, "json": True}
    failed = run("selftest", "--device", "9")
    assert failed.exit_code == 1 and "no such device" in failed.output
