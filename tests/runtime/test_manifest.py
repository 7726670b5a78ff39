"""The manifest reader refuses, by name, everything that is not exactly a manifest of schema 1."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from flashkda.errors import ArtifactError
from flashkda.manifest import Manifest, parse


def refused(raw: object) -> str:
    with pytest.raises(ArtifactError) as caught:
        parse(json.dumps(raw), "here/manifest.json", "build it anew")
    assert "here/manifest.json" in str(caught.value) and str(caught.value).endswith("; build it anew")
    return str(caught.value)


def test_a_sound_manifest_keeps_every_value(manifest: Manifest) -> None:
    assert len(manifest.artifacts) == 18
    assert manifest.contract.record.bytes == 13600
    assert [field.name for field in manifest.contract.record.fields][-1] == "beta_sigmoid"
    first = manifest.artifacts[0]
    assert (first.kernel, first.bv, first.record_order, first.parameters[0].name) == ("prepare", None, "a", "q")
    assert [(found.bv, found.record_order) for found in manifest.artifacts[1:4]] == [(16, "a"), (None, "b"), (32, "b")]


def test_every_field_is_required_and_no_other_is_allowed(raw_manifest: dict[str, Any]) -> None:
    def objects(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
        if isinstance(node, dict):
            return [path, *(found for key, value in node.items() for found in objects(value, (*path, key)))]
        return objects(node[0], (*path, 0)) if isinstance(node, list) and node else []

    def at(node: Any, path: tuple[str | int, ...]) -> Any:
        for step in path:
            node = node[step]
        return node

    places = objects(raw_manifest)
    assert len(places) == 7
    for path in places:
        extra = copy.deepcopy(raw_manifest)
        at(extra, path)["surprise"] = 1
        assert "surprise" in refused(extra)
        for name in at(raw_manifest, path):
            lacking = copy.deepcopy(raw_manifest)
            del at(lacking, path)[name]
            assert repr(name) in refused(lacking)


def test_another_schema_version_is_refused_before_its_fields_are_judged() -> None:
    assert "schema_version is 2" in refused({"schema_version": 2, "unheard_of": True})


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"manifest"', '{"schema_version": 1, "schema_version": 1}'])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match=r"; build it anew$"):
        parse(text, "manifest.json", "build it anew")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"; build it anew$"):
        parse(b"\xff\xfe\x00{", "manifest.json", "build it anew")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../prepare.cubin"),
        ("file", "sub/prepare.cubin"),
        ("file", "/etc/prepare.cubin"),
        ("file", "..\\prepare.cubin"),
        ("file", "..cubin"),
        ("file", "prepare.so"),
        ("file", "prepare.cubin\n"),
        ("kernel", "decode"),
        ("bv", 32),
        ("record_order", None),
        ("record_order", ""),
        ("record_order", "c"),
        ("record_order", "A"),
        ("record_order", ["a"]),
        ("size", "1234"),
        ("size", 0),
        ("size", True),
        ("size", 12.0),
        ("sha256", "00"),
        ("entry", ""),
        ("threads", 0),
        ("units_per_cta", None),
        ("dynamic_shared_memory", -1),
        ("least_driver", "525.60"),
        ("compute_capabilities", []),
        ("compute_capabilities", ["sm_90"]),
        ("parameters", {}),
    ],
)
def test_an_ill_typed_or_unsafe_artifact_field_is_refused_by_name(
    raw_manifest: dict[str, Any], field: str, value: object
) -> None:
    raw_manifest["artifacts"][0][field] = value
    assert f"artifacts[0].{field}" in refused(raw_manifest)


@pytest.mark.parametrize(
    ("field", "value"), [("offset", False), ("offset", 0.0), ("size", 8.0), ("type", "u64"), ("name", 1)]
)
def test_an_ill_typed_parameter_is_refused_by_name_in_every_artifact(
    raw_manifest: dict[str, Any], field: str, value: object
) -> None:
    """Also where it equals what is right, and where the same table stands right elsewhere."""
    last = len(raw_manifest["artifacts"]) - 1
    raw_manifest["artifacts"][last]["parameters"][0][field] = value
    assert f"artifacts[{last}].parameters[0].{field} is {value!r}" in refused(raw_manifest)


@pytest.mark.parametrize("bv", [None, 0, 48, "32"])
def test_a_recurrence_needs_a_bv_that_divides_the_head_dimension(raw_manifest: dict[str, Any], bv: object) -> None:
    raw_manifest["artifacts"][1]["bv"] = bv
    assert "artifacts[1].bv" in refused(raw_manifest)


def test_a_file_listed_twice_is_refused(raw_manifest: dict[str, Any]) -> None:
    raw_manifest["artifacts"].append(raw_manifest["artifacts"][0])
    assert "prepare.flashkda.a.sm_90a.cubin is listed twice" in refused(raw_manifest)


def test_two_files_with_one_claim_are_refused(raw_manifest: dict[str, Any]) -> None:
    raw_manifest["artifacts"].append({**raw_manifest["artifacts"][0], "file": "other.cubin"})
    assert "both claim" in refused(raw_manifest)


def test_two_prepares_of_one_record_order_are_refused(raw_manifest: dict[str, Any]) -> None:
    raw_manifest["artifacts"][2]["record_order"] = "a"
    assert "both claim to be prepare (numerics flashkda, record order a)" in refused(raw_manifest)


def test_two_recurrences_of_one_bv_are_refused_whatever_their_orders(raw_manifest: dict[str, Any]) -> None:
    raw_manifest["artifacts"][3]["bv"] = 16
    assert "both claim to be recurrence (numerics flashkda, bv 16)" in refused(raw_manifest)


def reordered(parameters: list[dict[str, Any]]) -> None:
    parameters[0], parameters[1] = parameters[1], parameters[0]


def wrong_size(parameters: list[dict[str, Any]]) -> None:
    parameters[0]["size"] = 4


def repeated(parameters: list[dict[str, Any]]) -> None:
    parameters[1]["name"] = parameters[0]["name"]


def unaligned(parameters: list[dict[str, Any]]) -> None:
    parameters[-1]["offset"] += 2


@pytest.mark.parametrize("damage", [reordered, wrong_size, repeated, unaligned])
def test_an_impossible_parameter_list_is_refused(
    raw_manifest: dict[str, Any], damage: Callable[[list[dict[str, Any]]], None]
) -> None:
    damage(raw_manifest["artifacts"][0]["parameters"])
    assert "artifacts[0].parameters" in refused(raw_manifest)


@pytest.mark.parametrize(("field", "value"), [("bytes", 4094), ("offset", 13000), ("dtype", "fp8"), ("shape", [16, 0])])
def test_an_inconsistent_record_field_is_refused(raw_manifest: dict[str, Any], field: str, value: object) -> None:
    raw_manifest["contract"]["record"]["fields"][0][field] = value
    assert "contract.record.fields[0]" in refused(raw_manifest)


def test_a_record_that_would_lose_its_alignment_is_refused(raw_manifest: dict[str, Any]) -> None:
    raw_manifest["contract"]["record"]["bytes"] = 13860
    assert "contract.record.bytes" in refused(raw_manifest)
