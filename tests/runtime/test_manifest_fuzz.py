"""Whatever the manifest's file holds, its reader gives a valid model or an `ArtifactError`."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashkda.errors import ArtifactError
from flashkda.manifest import Manifest, parse

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "manifests" / "schema.json").read_text())
)
TOP = (
    "schema_version", "package_version", "source_digest", "toolchain", "build_command", "contract", "artifacts"
)  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([-1, 0, 2**31, 2**63, 10**400, 1e999, "", "../x.cubin", "a/b.cubin", "\ud800", "\0", "9.0"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)

# A busy machine is not a fault of the reader's.
patient = settings(deadline=None)


def places(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every value below `node`; of the artifacts, those of one prepare and one recurrence kernel."""
    found = [path] if path else []
    if isinstance(node, dict):
        inner = list(node.items())
    elif isinstance(node, list):
        inner = list(enumerate(node))[:2]
    else:
        return found
    return found + [below for key, value in inner for below in places(value, (*path, key))]


def read(text: str | bytes) -> Manifest | None:
    try:
        model = parse(text, "manifest.json", "build it anew")
    except ArtifactError as error:
        # It can be shown, wherever the terminal.
        str(error).encode()
        return None
    SCHEMA.validate(json.loads(text))
    for artifact in model.artifacts:
        assert artifact.file == Path(artifact.file).name and artifact.entry.encode()
        assert artifact.size < 2**31
        assert all(parameter.offset + parameter.size <= 32764 for parameter in artifact.parameters)
    return model


@patient
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_and_any_text(text: str | bytes) -> None:
    assert read(text) is None


@patient
@given(values)
def test_any_json(value: Any) -> None:
    assert read(json.dumps(value)) is None


@patient
@given(st.dictionaries(st.sampled_from(TOP), values).map(lambda top: {**top, "schema_version": 1}))
def test_any_values_at_the_top(raw: dict[str, Any]) -> None:
    assert read(json.dumps(raw)) is None


@patient
@given(data=st.data())
def test_a_sound_manifest_with_one_value_replaced(manifest_text: str, data: st.DataObject) -> None:
    raw = json.loads(manifest_text)
    everywhere = places(raw)
    *path, last = data.draw(st.sampled_from(everywhere))
    node: Any = raw
    for step in path:
        node = node[step]
    kind = data.draw(st.sampled_from(["replace", "remove", "repeat", "swap"]))
    if kind == "replace":
        node[last] = data.draw(values)
    elif kind == "remove":
        del node[last]
    elif kind == "repeat" and isinstance(node, list):
        node.append(copy.deepcopy(node[last]))
    else:
        # A value that is right elsewhere.
        other: Any = raw
        for step in data.draw(st.sampled_from(everywhere)):
            other = other[step]
        node[last] = copy.deepcopy(other)
    read(json.dumps(raw))


@patient
@given(data=st.data())
def test_a_sound_manifest_with_bytes_changed(manifest_text: str, data: st.DataObject) -> None:
    text = bytearray(manifest_text.encode())
    for position in data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=4)):
        text[position] = data.draw(st.integers(0, 255))
    read(bytes(text))


@patient
@given(data=st.data())
def test_a_truncated_manifest(manifest_text: str, data: st.DataObject) -> None:
    assert read(manifest_text[: data.draw(st.integers(0, len(manifest_text) - 1))]) is None


@pytest.mark.parametrize("depth", [100, 900, 100_000])
@pytest.mark.parametrize("place", ["%s", '{"schema_version": 1, "toolchain": %s}', '{"schema_version": %s}'])
def test_deep_nesting(depth: int, place: str) -> None:
    assert read(place % ("[" * depth + "]" * depth)) is None
    assert read(place % ('{"a":' * depth + "1" + "}" * depth)) is None


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1.0"])
def test_numbers_that_are_no_sizes(manifest_text: str, number: str) -> None:
    assert read(manifest_text.replace('"threads": 128', f'"threads": {number}')) is None


def test_a_sound_manifest_fits_the_published_schema(manifest_text: str) -> None:
    assert read(manifest_text) is not None
