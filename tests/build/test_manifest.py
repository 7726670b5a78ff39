import copy
import json
from pathlib import Path

import jsonschema
import pytest

from flashkda_build.architectures import ARCHITECTURES
from flashkda_build.digest import sha256
from flashkda_build.manifest import canonical, differences, read_manifest

MANIFESTS = Path(__file__).parents[2] / "manifests"
SCHEMA = json.loads((MANIFESTS / "schema.json").read_text())


@pytest.fixture
def manifest(toys):
    return read_manifest(toys / "manifest.json")


def test_a_built_manifest_follows_the_schema(manifest):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize("released", sorted(MANIFESTS.glob("[0-9]*.json")), ids=lambda path: path.name)
def test_released_manifests_follow_the_schema_and_are_canonical(released):
    manifest = read_manifest(released)
    jsonschema.validate(manifest, SCHEMA)
    assert released.read_text() == canonical(manifest)
    assert manifest["package_version"] == released.stem


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.update(schema_version=2),
        lambda m: m.update(extra=1),
        lambda m: m.pop("source_digest"),
        lambda m: m.update(source_digest="XYZ"),
        lambda m: m["artifacts"].clear(),
        lambda m: m["artifacts"][0].pop("sha256"),
        lambda m: m["artifacts"][0].update(file="../evil.cubin"),
        lambda m: m["artifacts"][0].update(least_driver="525.60"),
        lambda m: m["artifacts"][0].update(registers=0),
        lambda m: m["artifacts"][0].update(kernel="other"),
        lambda m: m["artifacts"][0].update(record_order="c"),
        lambda m: m["artifacts"][0].pop("record_order"),
        lambda m: m["artifacts"][0]["parameters"][0].update(type="struct"),
        lambda m: m["contract"]["record"]["fields"][0].update(dtype="fp8"),
    ],
)
def test_the_schema_refuses_damage(manifest, damage):
    damage(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_the_manifest_describes_the_files_beside_it(toys, manifest):
    assert {a["arch"] for a in manifest["artifacts"]} == {a.name for a in ARCHITECTURES}
    for artifact in manifest["artifacts"]:
        data = (toys / artifact["file"]).read_bytes()
        assert (artifact["size"], artifact["sha256"]) == (len(data), sha256(data))
        assert artifact["entry"].encode() in data
    assert {path.name for path in toys.glob("*.cubin")} == {a["file"] for a in manifest["artifacts"]}


def test_parameters_carry_the_names_of_the_table_and_the_offsets_of_the_cubin(manifest):
    assert [(p["name"], p["type"], p["offset"], p["size"]) for p in manifest["artifacts"][0]["parameters"]] == [
        ("source", "pointer", 0, 8),
        ("target", "pointer", 8, 8),
        ("stride", "i64", 16, 8),
        ("count", "i32", 24, 4),
        ("factor", "f32", 28, 4),
    ]


def test_the_file_is_canonical(toys, manifest):
    assert (toys / "manifest.json").read_text() == canonical(manifest)


def test_the_runtime_reads_it(toys):
    from flashkda.manifest import parse

    parsed = parse((toys / "manifest.json").read_bytes(), "manifest.json", "")
    assert len(parsed.artifacts) == 6
    assert parsed.toolchain.ptxas_version == "12.9.83"


def test_differences_name_the_file_and_the_field(manifest):
    other = copy.deepcopy(manifest)
    assert differences(manifest, other) == []
    other["artifacts"][1]["sha256"] = "0" * 64
    other["source_digest"] = "1" * 64
    del other["artifacts"][2]
    lines = differences(manifest, other)
    assert len(lines) == 3
    assert lines[0].startswith("source_digest: ")
    assert any(manifest["artifacts"][1]["file"] in line and "sha256" in line for line in lines)
    assert any(line == f"{manifest['artifacts'][2]['file']}: only in the first" for line in lines)
