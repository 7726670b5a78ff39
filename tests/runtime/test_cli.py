"""`flashkda info` tells what is installed, what each device gets, and what is wrong."""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import flashkda
from flashkda.cli import main
from flashkda.errors import DriverError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(autouse=True)
def same_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `info` asks the machine for."""
    monkeypatch.setattr("flashkda.info.open_nvml", lambda: (None, "580.1"))
    monkeypatch.setattr("flashkda.info._version", {"torch": "2.99+cpu", "cuda-python": "13.1"}.get)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_info_shows_what_each_device_gets_and_why_not(artifact_folder: Path, cuda: Any) -> None:
    cuda.devices = [{"major": 9, "minor": 0, "sm_count": 132}, {"major": 12, "minor": 0, "sm_count": 170}]
    result = run("info", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["artifacts"]["folder"] == str(artifact_folder)
    assert report["artifacts"]["overridden_by"] == "FLASHKDA_ARTIFACTS"
    assert report["driver"] == {"cuda": "12.9", "version": 12090, "release": "580.1"}
    first, second = report["devices"]
    assert [kernel["file"] for kernel in first["kernels"]] == [
        *(f"prepare.flashkda.{order}.sm_90a.cubin" for order in "ab"),
        *(f"recurrence.flashkda.bv{bv}.sm_90a.cubin" for bv in (16, 32, 64, 128)),
    ]
    assert all(kernel["reason"] is None and kernel["refused"] == {} for kernel in first["kernels"])
    assert all(kernel["file"] is None for kernel in second["kernels"])
    assert {kernel["reason"] for kernel in second["kernels"]} == {
        "no kernel for compute capability 12.0; there are 9.0, 10.0, 10.3"
    }
    assert "not 12.0" in second["kernels"][0]["refused"]["prepare.flashkda.a.sm_90a.cubin"][0]


def test_info_for_a_person_says_the_same(artifact_folder: Path, cuda: Any) -> None:
    (artifact_folder / "stranger.cubin").write_bytes(b"?")
    result = run("info")
    assert result.exit_code == 0
    for part in (
        f"flashkda 0.1.0, Python {platform.python_version()}, {platform.platform()}",
        "torch 2.99+cpu, cuda-python 13.1, cuda-bindings not installed",
        "flash_kda: none",
        "driver: release 580.1, supports CUDA 12.9",
        "set by FLASHKDA_ARTIFACTS",
        "ptxas 12.9.86",
        "device 0: Made-up GPU, compute capability 9.0, 132 SMs",
        "prepare record order b: prepare.flashkda.b.sm_90a.cubin",
        "recurrence bv 64: recurrence.flashkda.bv64.sm_90a.cubin",
        "never loaded: stranger.cubin",
    ):
        assert part in result.stdout


def test_info_has_one_line_for_a_kernel_that_a_device_does_not_get(artifact_folder: Path, cuda: Any) -> None:
    cuda.devices = [{"major": 8, "minor": 0, "sm_count": 108}]
    result = run("info")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-7:] == [
        "device 0: Made-up GPU, compute capability 8.0, 108 SMs",
        *(
            f"  {kernel}: no kernel for compute capability 8.0; there are 9.0, 10.0, 10.3"
            for kernel in (
                *(f"prepare record order {order}" for order in "ab"),
                *(f"recurrence bv {bv}" for bv in (16, 32, 64, 128)),
            )
        ),
    ]


def test_info_says_which_prepare_kernel_a_recurrence_lacks(
    write_artifacts: Callable[[dict[str, Any]], Path], raw_manifest: dict[str, Any], cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    raw_manifest["artifacts"] = [one for one in raw_manifest["artifacts"] if ".a.sm_90a" not in one["file"]]
    monkeypatch.setenv("FLASHKDA_ARTIFACTS", str(write_artifacts(raw_manifest)))
    told = run("info").stdout.splitlines()
    reason = "no kernel for compute capability 9.0; there are 10.0, 10.3"
    assert f"  prepare record order a: {reason}" in told
    assert f"  recurrence bv 16: without prepare (numerics flashkda, record order a): {reason}" in told
    assert "  recurrence bv 32: recurrence.flashkda.bv32.sm_90a.cubin" in told


def test_info_tells_what_is_beside_the_package(
    artifact_folder: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    report = json.loads(run("info", "--json").stdout)
    assert report["versions"] == {"torch": "2.99+cpu", "cuda-python": "13.1", "cuda-bindings": None}
    assert report["system"]["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert report["system"]["python"] == platform.python_version()
    assert report["system"]["libc"] in (" ".join(platform.libc_ver()), None)
    assert "CUDA_VISIBLE_DEVICES: '1,0'" in run("info").stdout.splitlines()


@pytest.fixture
def module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Path]]:
    """Puts a `flash_kda` on the module path, in the folder given or as this package's; what it is found at."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "flash_kda", raising=False)

    def put(folder: Path) -> Path:
        folder.mkdir()
        (folder / "flash_kda.py").write_text("raise AssertionError('imported')")
        sys.path.append(str(folder))
        return folder / "flash_kda.py"

    yield put
    sys.modules.pop("flash_kda", None)


def test_info_tells_whose_flash_kda_is_there(
    artifact_folder: Path, cuda: Any, tmp_path: Path, module_path: Callable[[Path], Path]
) -> None:
    def told() -> Any:
        return json.loads(run("info", "--json").stdout)["flash_kda"]

    assert told() == {"whose": None, "file": None, "problem": None}
    flashkda.install_as_flash_kda()
    ours = told()
    assert ours["whose"] == "flashkda" and "as_flash_kda" in ours["file"] and ours["problem"] is None
    assert f"flash_kda: this package, from {ours['file']}" in run("info").stdout.splitlines()
    module_path(tmp_path / "other")
    assert told()["whose"] == "flashkda" and "another flash_kda is installed" in told()["problem"]
    assert "but its import fails: another flash_kda is installed" in run("info").stdout


def test_info_tells_of_another_flash_kda_without_importing_it(
    artifact_folder: Path, cuda: Any, tmp_path: Path, module_path: Callable[[Path], Path]
) -> None:
    other = module_path(tmp_path / "other")
    report = json.loads(run("info", "--json").stdout)
    assert report["flash_kda"] == {"whose": "another", "file": str(other), "problem": None}
    assert f"flash_kda: another one, from {other}" in run("info").stdout.splitlines()
    assert "flash_kda" not in sys.modules


def test_info_without_a_driver_is_no_failure(artifact_folder: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(flags: int) -> Any:
        raise RuntimeError("no library")

    monkeypatch.setattr(cuda, "cuInit", no_driver)
    result = run("info")
    assert result.exit_code == 0
    assert "driver: there is no CUDA driver" in result.stdout and "devices: none" in result.stdout


def test_info_fails_on_a_changed_or_missing_artifact(artifact_folder: Path, cuda: Any) -> None:
    (artifact_folder / "prepare.flashkda.a.sm_90a.cubin").write_bytes(b"?")
    result = run("info")
    assert result.exit_code == 1
    assert "PROBLEM: prepare.flashkda.a.sm_90a.cubin" in result.stdout
    (artifact_folder / "manifest.json").unlink()
    result = run("info", "--json")
    assert result.exit_code == 1
    assert "manifest.json is missing" in json.loads(result.stdout)["artifacts"]["problems"][0]


def test_selftest_passes_its_options_and_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
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
