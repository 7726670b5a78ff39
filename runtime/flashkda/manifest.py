"""The manifest of compiled kernels: a frozen typed model and its strict parser.

The parser accepts exactly the fields of schema version 1; anything missing, extra, ill-typed, ambiguous or inconsistent
raises `ArtifactError` with the path of the offending field.
"""

import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from flashkda.errors import ArtifactError

SCHEMA_VERSION = 1
ParameterType = Literal["pointer", "i64", "i32", "f32"]
PARAMETER_BYTES: dict[str, int] = {"pointer": 8, "i64": 8, "i32": 4, "f32": 4}
KERNELS = ("prepare", "recurrence")
DTYPE_BYTES = {"bf16": 2, "fp32": 4}

# What the driver takes these numbers as.
_INT32_MAX = 2**31 - 1
# Of all parameters of a kernel together.
_PARAMETER_BYTES_LIMIT = 32764
_MOST_THREADS = 1024
_MOST_REGISTERS = 255
# CUDA 12.0; no architecture of ours has an older one.
_FIRST_DRIVER = 12000

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*\.cubin")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+]*")
_PTXAS_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_ARCH = re.compile(r"sm_[0-9]+[af]?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMPUTE_CAPABILITY = re.compile(r"[1-9][0-9]*\.[0-9]")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter as the cubin declares it; offset and size in bytes."""

    name: str
    type: ParameterType
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled kernel. Sizes are in bytes; `least_driver` counts as cuDriverGetVersion does (12080: CUDA 12.8)."""

    kernel: str
    numerics: str
    bv: int | None
    arch: str
    compute_capabilities: tuple[str, ...]
    file: str
    size: int
    sha256: str
    entry: str
    parameters: tuple[Parameter, ...]
    threads: int
    units_per_cta: int
    dynamic_shared_memory: int
    static_shared_memory: int
    registers: int
    least_driver: int
    pdl: bool


@dataclass(frozen=True, slots=True)
class RecordField:
    """One array of the workspace record; offset and bytes from the record's start."""

    name: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The workspace record of one (tile, head); `bytes` is its size and its distance to the next one."""

    bytes: int
    fields: tuple[RecordField, ...]


@dataclass(frozen=True, slots=True)
class Contract:
    """What the kernels need from their caller: head dimension, tokens a chunk, workspace alignment in bytes, record."""

    head_dim: int
    chunk: int
    workspace_alignment: int
    record: Record


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What compiled the kernels."""

    dsl: str
    dsl_version: str
    flavour: str
    ptxas_version: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole set of compiled kernels."""

    schema_version: int
    package_version: str
    source_digest: str
    toolchain: Toolchain
    build_command: str
    contract: Contract
    artifacts: tuple[Artifact, ...]


def parse(text: str | bytes, source: str) -> Manifest:
    """Parse a manifest; `source` names it in errors. Raises `ArtifactError`."""
    try:
        raw: object = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{source} is not a readable manifest: {error}; reinstall the package") from error
    root = _Node(raw, source, "")
    # Checked before the field set: another schema's fields are not ours to judge.
    version = root.peek("schema_version").integer()
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{source}: schema_version is {version}, but this package reads {SCHEMA_VERSION}; "
            "install the package version that the artifacts were built for"
        )
    root.only(
        "schema_version", "package_version", "source_digest", "toolchain", "build_command", "contract", "artifacts"
    )
    contract = _contract(root["contract"])
    artifacts = root["artifacts"].items(lambda node: _artifact(node, contract))
    _refuse_ambiguity(artifacts, source)
    return Manifest(
        schema_version=version,
        package_version=root["package_version"].matching(_VERSION, "a version like 1.2.3"),
        source_digest=root["source_digest"].matching(_SHA256, "64 hexadecimal digits"),
        toolchain=_toolchain(root["toolchain"]),
        build_command=root["build_command"].string(),
        contract=contract,
        artifacts=artifacts,
    )


def _toolchain(node: "_Node") -> Toolchain:
    node.only("dsl", "dsl_version", "flavour", "ptxas_version", "options")
    return Toolchain(
        dsl=node["dsl"].string(),
        dsl_version=node["dsl_version"].string(),
        flavour=node["flavour"].string(),
        ptxas_version=node["ptxas_version"].matching(_PTXAS_VERSION, "a version like 1.2.3"),
        options=node["options"].items(_Node.string),
    )


def _contract(node: "_Node") -> Contract:
    node.only("head_dim", "chunk", "workspace_alignment", "record")
    record = node["record"]
    record.only("bytes", "fields")
    record_bytes = record["bytes"].integer(1)
    alignment = node["workspace_alignment"].integer(1)
    if record_bytes % alignment:
        raise record["bytes"].error(f"a multiple of workspace_alignment ({alignment})")

    def field(item: _Node) -> RecordField:
        item.only("name", "offset", "bytes", "dtype", "shape")
        found = RecordField(
            name=item["name"].string(),
            offset=item["offset"].integer(0),
            bytes=item["bytes"].integer(1),
            dtype=item["dtype"].one_of(tuple(DTYPE_BYTES)),
            shape=item["shape"].items(lambda size: size.integer(1)),
        )
        expected = DTYPE_BYTES[found.dtype]
        for size in found.shape:
            expected *= size
            if expected > record_bytes:
                raise item["shape"].error(f"inside the record's {record_bytes} bytes")
        if found.bytes != expected:
            raise item["bytes"].error(f"{expected}, the size of {found.dtype}{list(found.shape)}")
        if found.offset + found.bytes > record_bytes:
            raise item.error(f"inside the record's {record_bytes} bytes")
        return found

    return Contract(
        head_dim=node["head_dim"].integer(1),
        chunk=node["chunk"].integer(1),
        workspace_alignment=alignment,
        record=Record(record_bytes, record["fields"].items(field)),
    )


def _artifact(node: "_Node", contract: Contract) -> Artifact:
    node.only(
        "kernel", "numerics", "bv", "arch", "compute_capabilities", "file", "size", "sha256", "entry", "parameters",
        "threads", "units_per_cta", "dynamic_shared_memory", "static_shared_memory", "registers", "least_driver", "pdl",
    )  # fmt: skip
    kernel = node["kernel"].one_of(KERNELS)
    bv = None
    if kernel == "recurrence":
        bv = node["bv"].integer(1)
        if contract.head_dim % bv:
            raise node["bv"].error(f"a divisor of head_dim ({contract.head_dim})")
    else:
        node["bv"].require_null()
    capabilities = node["compute_capabilities"].items(lambda item: item.matching(_COMPUTE_CAPABILITY, "like '9.0'"))
    if len(set(capabilities)) != len(capabilities):
        raise node["compute_capabilities"].error("free of repetitions")
    return Artifact(
        kernel=kernel,
        numerics=node["numerics"].string(),
        bv=bv,
        arch=node["arch"].matching(_ARCH, "like sm_90a"),
        compute_capabilities=capabilities,
        file=node["file"].matching(_FILE_NAME, "a plain file name ending in .cubin, without any folder"),
        size=node["size"].integer(1),
        sha256=node["sha256"].matching(_SHA256, "64 lower-case hexadecimal digits"),
        entry=node["entry"].string(),
        parameters=_parameters(node["parameters"]),
        threads=node["threads"].integer(1, _MOST_THREADS),
        units_per_cta=node["units_per_cta"].integer(1),
        dynamic_shared_memory=node["dynamic_shared_memory"].integer(0),
        static_shared_memory=node["static_shared_memory"].integer(0),
        registers=node["registers"].integer(1, _MOST_REGISTERS),
        least_driver=node["least_driver"].integer(_FIRST_DRIVER),
        pdl=node["pdl"].boolean(),
    )


def _parameters(node: "_Node") -> tuple[Parameter, ...]:
    def parameter(item: _Node) -> Parameter:
        item.only("name", "type", "offset", "size")
        kind = cast(ParameterType, item["type"].one_of(tuple(PARAMETER_BYTES)))
        found = Parameter(
            item["name"].string(), kind, item["offset"].integer(0, _PARAMETER_BYTES_LIMIT - 8), item["size"].integer(1)
        )
        if found.size != PARAMETER_BYTES[kind]:
            raise item["size"].error(f"{PARAMETER_BYTES[kind]} for type {kind}")
        return found

    parameters = node.items(parameter)
    end = 0
    for found in parameters:
        if found.offset < end or found.offset % found.size:
            raise node.error(f"in ascending, aligned, non-overlapping order (see {found.name!r})")
        end = found.offset + found.size
    if len({found.name for found in parameters}) != len(parameters):
        raise node.error("free of repeated names")
    return parameters


def _refuse_ambiguity(artifacts: tuple[Artifact, ...], source: str) -> None:
    files: set[str] = set()
    claims: dict[tuple[str, str, int | None, str], str] = {}
    for artifact in artifacts:
        if artifact.file in files:
            raise ArtifactError(f"{source}: {artifact.file} is listed twice; reinstall the package")
        files.add(artifact.file)
        for capability in artifact.compute_capabilities:
            claim = (artifact.kernel, artifact.numerics, artifact.bv, capability)
            if claim in claims:
                raise ArtifactError(
                    f"{source}: {claims[claim]} and {artifact.file} both claim to be {artifact.kernel} "
                    f"(numerics {artifact.numerics}, bv {artifact.bv}) for compute capability {capability}; "
                    "reinstall the package"
                )
            claims[claim] = artifact.file


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"an object repeats a key (its keys: {reprlib.repr([key for key, _ in pairs])})")
    return result


_T = TypeVar("_T")


class _Node:
    """A JSON value together with where it stands, so that every refusal can say so."""

    def __init__(self, value: object, source: str, path: str) -> None:
        self._value = value
        self._source = source
        self._path = path

    def error(self, allowed: str) -> ArtifactError:
        # reprlib: the nesting may be as deep as the JSON parser allows, which repr() does not survive.
        shown = reprlib.repr(self._value)
        return ArtifactError(
            f"{self._source}: {self._path or 'the manifest'} is {shown}, but must be {allowed}; reinstall the package"
        )

    def _object(self) -> dict[str, object]:
        if not isinstance(self._value, dict):
            raise self.error("an object")
        return self._value

    def peek(self, name: str) -> "_Node":
        fields = self._object()
        if name not in fields:
            raise ArtifactError(f"{self._source}: {self._path or 'the manifest'} lacks {name!r}; reinstall the package")
        return _Node(fields[name], self._source, f"{self._path}.{name}" if self._path else name)

    __getitem__ = peek

    def only(self, *names: str) -> None:
        for name in names:
            self.peek(name)
        extra = sorted(set(self._object()) - set(names))
        if extra:
            where = self._path or "the manifest"
            raise ArtifactError(
                f"{self._source}: {where} has unknown fields {reprlib.repr(extra)}; reinstall the package"
            )

    def items(self, read: "Callable[[_Node], _T]") -> tuple[_T, ...]:
        if not isinstance(self._value, list) or not self._value:
            raise self.error("a list that is not empty")
        return tuple(
            read(_Node(item, self._source, f"{self._path}[{index}]")) for index, item in enumerate(self._value)
        )

    def string(self) -> str:
        # isprintable refuses lone surrogates, which no encoding takes.
        if not isinstance(self._value, str) or not self._value or not self._value.isprintable():
            raise self.error("a non-empty string of printable characters")
        return self._value

    def matching(self, pattern: re.Pattern[str], allowed: str) -> str:
        value = self.string()
        if pattern.fullmatch(value) is None:
            raise self.error(allowed)
        return value

    def one_of(self, allowed: tuple[str, ...]) -> str:
        value = self.string()
        if value not in allowed:
            raise self.error(f"one of {', '.join(allowed)}")
        return value

    def integer(self, least: int = 0, most: int = _INT32_MAX) -> int:
        # bool is an int in Python, but true is no size.
        if type(self._value) is not int or not least <= self._value <= most:
            raise self.error(f"an integer from {least} to {most}")
        return self._value

    def boolean(self) -> bool:
        if not isinstance(self._value, bool):
            raise self.error("true or false")
        return self._value

    def require_null(self) -> None:
        if self._value is not None:
            raise self.error("null")
