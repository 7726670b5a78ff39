"""What the wheel says about where its kernels come from."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from flashkda_build.provenance import BuildPackage, _contents, build_packages, statement
from flashkda_build.sbom import bill_of_materials

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = {
    "package_version": "0.1.0",
    "source_digest": "ab" * 32,
    "build_command": "flashkda-build",
    "toolchain": {
        "dsl": "some-dsl", "dsl_version": "1.2.3", "flavour": "cu12", "ptxas_version": "12.9.83",
        "options": ["--opt-level", "3"],
    },
    "artifacts": [
        {"file": f"{kernel}.cubin", "sha256": digit * 64, "arch": "sm_90a", "kernel": kernel}
        for kernel, digit in (("prepare", "1"), ("recurrence", "2"))
    ],
}  # fmt: skip
PACKAGES = (BuildPackage("some-dsl", "1.2.3", "cd" * 32), BuildPackage("some-dsl-libs", "1.2.3", "ef" * 32))


def test_the_statement_names_every_cubin_and_everything_it_was_made_of() -> None:
    found = statement(MANIFEST, PACKAGES)
    assert found["subject"] == [
        {"name": "prepare.cubin", "digest": {"sha256": "1" * 64}},
        {"name": "recurrence.cubin", "digest": {"sha256": "2" * 64}},
    ]
    definition = found["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"command": "flashkda-build"}
    assert definition["internalParameters"]["ptxas"] == "12.9.83"
    assert definition["internalParameters"]["dsl"] == "some-dsl 1.2.3 (cu12)"
    assert [(entry["uri"], entry["digest"]["sha256"]) for entry in definition["resolvedDependencies"]] == [
        ("pkg:pypi/flashkda@0.1.0", "ab" * 32),
        ("pkg:pypi/some-dsl@1.2.3", "cd" * 32),
        ("pkg:pypi/some-dsl-libs@1.2.3", "ef" * 32),
    ]


def test_the_bill_of_materials_is_valid_cyclonedx_and_lists_the_cubins() -> None:
    text = bill_of_materials(MANIFEST, PACKAGES, 1735689600)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)
    assert {part["name"]: part["hashes"][0]["content"] for part in found["components"]} == {
        "flashkda/artifacts/prepare.cubin": "1" * 64,
        "flashkda/artifacts/recurrence.cubin": "2" * 64,
    }
    assert found["metadata"]["timestamp"] == "2025-01-01T00:00:00+00:00"
    assert {tool["name"] for tool in found["metadata"]["tools"]["components"]} == {"ptxas", "some-dsl", "some-dsl-libs"}


def test_equal_builds_write_equal_text_in_any_process() -> None:
    code = (
        "import test_provenance as t, json; "
        "print(t.bill_of_materials(t.MANIFEST, t.PACKAGES, 0), json.dumps(t.statement(t.MANIFEST, t.PACKAGES)))"
    )
    path = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, ROOT / "build_kernels", ROOT / "runtime"))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60,
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(outputs) == 1
    other = {**MANIFEST, "source_digest": "00" * 32}
    assert json.loads(bill_of_materials(other, PACKAGES, 0))["serialNumber"] not in outputs.pop()


@pytest.fixture
def installed(tmp_path: Path) -> Any:
    """Installs a made-up distribution with the given lines in its RECORD."""

    def install(*lines: str) -> importlib.metadata.Distribution:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "thing-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        (folder / "RECORD").write_text("".join(f"{line}\n" for line in lines))
        return importlib.metadata.Distribution.at(folder)

    return install


def test_a_packages_digest_is_that_of_its_wheel_whoever_installed_it(installed: Any) -> None:
    own = ("thing/a.py,sha256=AAAA,1", "thing/b.so,sha256=BBBB,2")
    plain = _contents(installed(*own))
    by_pip = (
        "../../../bin/thing,sha256=CCCC,1",
        "thing-1.0.dist-info/INSTALLER,sha256=DDDD,4",
        "thing-1.0.dist-info/REQUESTED,sha256=EEEE,0",
        "thing-1.0.dist-info/direct_url.json,sha256=FFFF,9",
        "thing-1.0.dist-info/RECORD,,",
        "thing/__pycache__/a.cpython-311.pyc,,",
    )
    assert _contents(installed(*by_pip, *reversed(own))) == plain
    assert _contents(installed(own[0], "thing/b.so,sha256=BBBC,2")) != plain
    assert _contents(installed(own[0], "thing/c.so,sha256=BBBB,2")) != plain
    assert _contents(installed(own[0])) != plain


def test_the_installed_dsl_is_described_with_the_libraries_that_compile() -> None:
    packages = {package.name: package for package in build_packages()}
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu12"} <= set(packages)
    assert not any("qnx" in name or "cu13" in name for name in packages)
    assert len({package.contents for package in packages.values()}) == len(packages)
