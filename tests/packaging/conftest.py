"""What the formats of provenance.json ask for, written down apart from the code that fills them in."""

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

URI = {"type": "string", "pattern": r"^[a-z][a-z0-9+.-]*:\S+$"}
# By in-toto's DigestSet: values of these two are lowercase hex.
DIGESTS = {
    "type": "object",
    "minProperties": 1,
    "properties": {name: {"type": "string", "pattern": "^[0-9a-f]{64}$"} for name in ("sha256", "dirHash")},
    "additionalProperties": {"type": "string", "minLength": 1},
}
RESOURCE = {
    "type": "object",
    "anyOf": [{"required": ["uri"]}, {"required": ["digest"]}, {"required": ["content"]}],
    "properties": {
        "name": {"type": "string"},
        "uri": URI,
        "digest": DIGESTS,
        "content": {"type": "string"},
        "downloadLocation": URI,
        "mediaType": {"type": "string"},
        "annotations": {"type": "object"},
    },
    # Fields of one's own are allowed; we write none, so that one beyond these is a misspelt one.
    "additionalProperties": False,
}
RESOURCES = {"type": "array", "items": RESOURCE}


def _fields(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


PROVENANCE_V1 = _fields(
    ("buildDefinition", "runDetails"),
    buildDefinition=_fields(
        ("buildType", "externalParameters"),
        buildType=URI,
        externalParameters={"type": "object", "minProperties": 1},
        internalParameters={"type": "object"},
        resolvedDependencies=RESOURCES,
    ),
    runDetails=_fields(
        ("builder",),
        builder=_fields(("id",), id=URI, version={"type": "object"}, builderDependencies=RESOURCES),
        metadata=_fields(
            (), invocationId={"type": "string"}, startedOn={"type": "string"}, finishedOn={"type": "string"}
        ),
        byproducts=RESOURCES,
    ),
)
STATEMENT_V1 = _fields(
    ("_type", "subject", "predicateType", "predicate"),
    _type={"const": "https://in-toto.io/Statement/v1"},
    subject={"type": "array", "minItems": 1, "items": {**RESOURCE, "required": ["digest"]}},
    predicateType={"const": "https://slsa.dev/provenance/v1"},
    predicate=PROVENANCE_V1,
)


@pytest.fixture
def problems() -> Callable[[Any], list[str]]:
    """What is wrong with a statement, by in-toto Statement v1 and SLSA provenance v1."""
    validator = Draft202012Validator(STATEMENT_V1)
    return lambda statement: [f"{error.json_path}: {error.message}" for error in validator.iter_errors(statement)]
