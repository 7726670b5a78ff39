"""What the wheel says about where its kernels come from."""

import base64
import copy
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from flashkda_build.provenance import CONTENTS, BuildPackage, _contents, build_packages, statement
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
    source, *packages = definition["resolvedDependencies"]
    assert (source["uri"], source["digest"]) == ("pkg:pypi/flashkda@0.1.0", {"sha256": "ab" * 32})
    assert [(entry["uri"], entry["digest"]) for entry in packages] == [
        ("pkg:pypi/some-dsl@1.2.3", {"dirHash": "cd" * 32}),
        ("pkg:pypi/some-dsl-libs@1.2.3", {"dirHash": "ef" * 32}),
    ]
    # No reader takes it for the digest of the wheel.
    assert all(entry["annotations"] == {"digest": CONTENTS} for entry in packages)


def test_the_statement_has_what_in_toto_and_slsa_ask_for(problems: Callable[[Any], list[str]]) -> None:
    right = statement(MANIFEST, PACKAGES)
    assert problems(right) == []
    for path in (
        ("_type",), ("subject",), ("subject", 0, "digest"), ("predicateType",), ("predicate",),
        ("predicate", "buildDefinition"), ("predicate", "buildDefinition", "buildType"),
        ("predicate", "buildDefinition", "externalParameters"), ("predicate", "runDetails"),
        ("predicate", "runDetails", "builder"), ("predicate", "runDetails", "builder", "id"),
    ):  # fmt: skip
        wrong = copy.deepcopy(right)
        holder: Any = wrong
        for step in path[:-1]:
            holder = holder[step]
        value = holder.pop(path[-1])
        assert problems(wrong), f"{path} may be missing"
        holder[f"{path[-1]}s"] = value
        assert problems(wrong), f"{path} may be misspelt"
    wrong = copy.deepcopy(right)
    wrong["predicate"]["buildDefinition"]["resolvedDependencies"][1] = {"name": "neither uri nor digest"}
    assert problems(wrong)


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


def test_a_packages_digest_is_what_the_statement_says_to_run(installed: Any, tmp_path: Path) -> None:
    # The order of paths is that of their bytes: capitals first, "-" before "/".
    files = {"thing/a.py": b"a", "thing/Z.py": b"", "thing-1.0.dist-info/METADATA": b"c", "thing/b/c.so": b"\0"}
    record = []
    for name, data in files.items():
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        record.append(f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},{len(data)}")
    (tmp_path / "unpacked/thing-1.0.dist-info/RECORD").write_text("as in the wheel, before anything is installed\n")
    command = CONTENTS[CONTENTS.index("find ") :]
    said = subprocess.run(command, shell=True, check=True, capture_output=True, text=True, cwd=tmp_path / "unpacked")
    assert said.stdout.split()[0] == _contents(installed(*record))


def test_the_installed_dsl_is_described_with_the_libraries_that_compile() -> None:
    packages = {package.name: package for package in build_packages()}
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu12"} <= set(packages)
    assert not any("qnx" in name or "cu13" in name for name in packages)
    assert len({package.contents for package in packages.values()}) == len(packages)
