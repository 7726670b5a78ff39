"""A built wheel: FLASHKDA_WHEEL=PATH names it; without it there is nothing to look at."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from flashkda_build.provenance import build_packages

WHEEL = os.environ.get("FLASHKDA_WHEEL")
pytestmark = pytest.mark.skipif(not WHEEL, reason="FLASHKDA_WHEEL names no wheel")
LIMIT = 3_000_000


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    with zipfile.ZipFile(WHEEL or "") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def manifest(files: dict[str, bytes]) -> Any:
    return json.loads(files["flashkda/artifacts/manifest.json"])


def metadata(files: dict[str, bytes], name: str) -> bytes:
    (found,) = (data for file, data in files.items() if re.fullmatch(rf"flashkda-[^/]*\.dist-info/{name}", file))
    return found


def test_it_is_one_small_wheel_for_every_platform_and_python() -> None:
    assert re.fullmatch(r"flashkda-[0-9.]+-py3-none-any\.whl", Path(WHEEL or "").name)
    assert os.path.getsize(WHEEL or "") < LIMIT


def test_it_holds_exactly_the_manifests_cubins(files: dict[str, bytes], manifest: Any) -> None:
    prefix = "flashkda/artifacts/"
    held = {name.removeprefix(prefix) for name in files if name.startswith(prefix)}
    assert held == {artifact["file"] for artifact in manifest["artifacts"]} | {"manifest.json"}
    for artifact in manifest["artifacts"]:
        data = files[prefix + artifact["file"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (artifact["size"], artifact["sha256"])


def test_nothing_in_it_is_a_test_a_cache_or_a_path_of_the_builder(files: dict[str, bytes]) -> None:
    assert not [name for name in files if re.search(r"(^|/)(tests?|__pycache__|\.ci)(/|$)", name)]
    assert {name.split("/")[0] for name in files} <= {"flashkda", "flashkda_build"} | {
        name.split("/")[0] for name in files if ".dist-info/" in name
    }
    root = str(Path(__file__).parents[2]).encode()
    assert not [name for name, data in files.items() if root in data]


def test_flash_kda_lies_only_where_it_is_asked_for(files: dict[str, bytes]) -> None:
    named = {name for name in files if "flash_kda" in (Path(name).stem, *Path(name).parts)}
    assert named == {"flashkda/as_flash_kda/flash_kda.py"}


def test_its_record_lists_every_file_with_its_digest(files: dict[str, bytes]) -> None:
    rows = list(csv.reader(io.StringIO(metadata(files, "RECORD").decode())))
    assert {row[0] for row in rows} == set(files)
    for name, digest, size in rows:
        if not name.endswith("/RECORD"):
            found = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(files[name]))


def test_it_asks_for_two_packages_and_no_more(files: dict[str, bytes]) -> None:
    fields = Parser().parsestr(metadata(files, "METADATA").decode())
    needed = [entry for entry in fields.get_all("Requires-Dist", []) if "extra ==" not in entry]
    assert sorted(re.match(r"[a-z-]+", entry)[0] for entry in needed) == ["click", "cuda-python"]  # type: ignore[index]


def test_its_bill_of_materials_is_valid_and_agrees_with_the_files(files: dict[str, bytes], manifest: Any) -> None:
    text = metadata(files, r"sboms/flashkda\.cdx\.json").decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = {part["name"]: part["hashes"][0]["content"] for part in json.loads(text)["components"]}
    assert listed == {f"flashkda/artifacts/{found['file']}": found["sha256"] for found in manifest["artifacts"]}
    assert all(hashlib.sha256(files[name]).hexdigest() == digest for name, digest in listed.items())


def test_its_provenance_is_valid_and_agrees_with_the_manifest(
    files: dict[str, bytes], manifest: Any, problems: Callable[[Any], list[str]]
) -> None:
    found = json.loads(files["flashkda/provenance.json"])
    assert problems(found) == []
    assert {entry["name"]: entry["digest"]["sha256"] for entry in found["subject"]} == {
        artifact["file"]: artifact["sha256"] for artifact in manifest["artifacts"]
    }
    definition = found["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"command": manifest["build_command"]}
    assert definition["internalParameters"]["ptxas"] == manifest["toolchain"]["ptxas_version"]
    source, *packages = definition["resolvedDependencies"]
    assert source["digest"]["sha256"] == manifest["source_digest"]
    assert f"pkg:pypi/{manifest['toolchain']['dsl']}@{manifest['toolchain']['dsl_version']}" in {
        package["uri"] for package in packages
    }


def test_its_provenance_and_bill_of_materials_name_the_compilers_as_they_are_here(files: dict[str, bytes]) -> None:
    # The wheel was built in an environment of its own; the pin makes it equal to this one's.
    here = {package.purl: package.contents for package in build_packages()}
    found = json.loads(files["flashkda/provenance.json"])
    _, *packages = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {package["uri"]: package["digest"] for package in packages} == {
        uri: {"dirHash": digest} for uri, digest in here.items()
    }
    bill = json.loads(metadata(files, r"sboms/flashkda\.cdx\.json"))
    tools = {tool["bom-ref"]: tool["properties"] for tool in bill["metadata"]["tools"]["components"] if "purl" in tool}
    assert tools == {uri: [{"name": "flashkda:contents_dirHash", "value": digest}] for uri, digest in here.items()}
