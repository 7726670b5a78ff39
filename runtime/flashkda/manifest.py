"""The manifest of compiled kernels: an immutable typed model and its strict parser.

The parser accepts exactly the fields of schema version 1; anything missing, extra, ill-typed, ambiguous or inconsistent
raises `ArtifactError` with the path of the offending field.
"""

import json
import re
import reprlib
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypeVar

from flashkda.errors import ArtifactError

SCHEMA_VERSION = 1
ParameterType = Literal["pointer", "i64", "i32", "f32"]
PARAMETER_BYTES: dict[str, int] = {"pointer": 8, "i64": 8, "i32": 4, "f32": 4}
KERNELS = ("prepare", "recurrence")
RECORD_ORDERS = ("a", "b")
DTYPE_BYTES = {"bf16": 2, "fp32": 4}

# What the driver takes these numbers as.
_INT32_MAX = 2**31 - 1
# Of all parameters of a kernel together.
_PARAMETER_BYTES_LIMIT = 32764
_MOST_THREADS = 1024
_MOST_REGISTERS = 255
# CUDA 12.0; no architecture of ours has an older one.
_FIRST_DRIVER = 12000


class Parameter(NamedTuple):
    """One kernel parameter as the cubin declares it; offset and size in bytes."""

    name: str
    type: ParameterType
    offset: int
    size: int


class Artifact(NamedTuple):
    """One compiled kernel. Sizes are in bytes; `least_driver` counts as cuDriverGetVersion does (12080: CUDA 12.8).

    record_order: of the record's fields, as prepare writes and a recurrence reads them; only equal ones go together.
    """

    kernel: str
    numerics: str
    bv: int | None
    record_order: str
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


class RecordField(NamedTuple):
    """One array of the workspace record; offset and bytes from the record's start."""

    name: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


class Record(NamedTuple):
    """The workspace record of one (tile, head); `bytes` is its size and its distance to the next one."""

    bytes: int
    fields: tuple[RecordField, ...]


class Contract(NamedTuple):
    """What the kernels need from their caller: head dimension, tokens a chunk, workspace alignment in bytes, record."""

    head_dim: int
    chunk: int
    workspace_alignment: int
    record: Record


class Toolchain(NamedTuple):
    """What compiled the kernels."""

    dsl: str
    dsl_version: str
    flavour: str
    ptxas_version: str
    options: tuple[str, ...]


class Manifest(NamedTuple):
    """A whole set of compiled kernels."""

    schema_version: int
    package_version: str
    source_digest: str
    toolchain: Toolchain
    build_command: str
    contract: Contract
    artifacts: tuple[Artifact, ...]


def parse(text: str | bytes, source: str, remedy: str) -> Manifest:
    """Parse a manifest; in errors `source` names it, and `remedy` says what to do. Raises `ArtifactError`."""
    try:
        raw: object = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{source} is not a readable manifest: {error}; {remedy}") from error
    try:
        return _read_manifest(raw)
    except _Fault as fault:
        raise ArtifactError(f"{source}: {fault}; {remedy}") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"an object repeats a key (its keys: {reprlib.repr([key for key, _ in pairs])})")
    return result


class _Fault(Exception):
    """What is wrong with a value; each container around it adds the step that leads there (".name" or "[3]")."""

    def __init__(self, trouble: str, path: str = "") -> None:
        self.path = path
        self._trouble = trouble

    def __str__(self) -> str:
        return f"{self.path.removeprefix('.') or 'the manifest'} {self._trouble}"


def _refusal(value: object, allowed: str, path: str = "") -> _Fault:
    # reprlib: the nesting may be as deep as the JSON parser allows, which repr() does not survive.
    return _Fault(f"is {reprlib.repr(value)}, but must be {allowed}", path)


# A reader makes a part of the model from a JSON value, or raises `_Fault`.
_T = TypeVar("_T")
_Reader = Callable[[Any], _T]


def _object(make: Callable[..., _T], **readers: _Reader[Any]) -> _Reader[_T]:
    """Reads an object of exactly these fields, one after the other, and makes the model's part of them."""

    def read(value: Any) -> _T:
        if type(value) is not dict:
            raise _refusal(value, "an object")
        fields = {}
        for name, reader in readers.items():
            if name not in value:
                raise _Fault(f"lacks {name!r}")
            try:
                fields[name] = reader(value[name])
            except _Fault as fault:
                fault.path = f".{name}{fault.path}"
                raise
        if len(value) != len(readers):
            raise _Fault(f"has unknown fields {reprlib.repr(sorted(value.keys() - readers.keys()))}")
        return make(**fields)

    return read


def _list(reader: _Reader[_T]) -> _Reader[tuple[_T, ...]]:
    """Reads a list that is not empty."""

    def read(value: Any) -> tuple[_T, ...]:
        if type(value) is not list or not value:
            raise _refusal(value, "a list that is not empty")
        items = []
        for item in value:
            try:
                items.append(reader(item))
            except _Fault as fault:
                fault.path = f"[{len(items)}]{fault.path}"
                raise
        return tuple(items)

    return read


def _string(value: Any) -> str:
    # isprintable refuses lone surrogates, which no encoding takes.
    if type(value) is not str or not value or not value.isprintable():
        raise _refusal(value, "a non-empty string of printable characters")
    return value


def _matching(pattern: str, allowed: str) -> _Reader[str]:
    matches = re.compile(pattern).fullmatch

    def read(value: Any) -> str:
        text = _string(value)
        if matches(text) is None:
            raise _refusal(value, allowed)
        return text

    return read


def _one_of(allowed: Collection[str]) -> _Reader[str]:
    def read(value: Any) -> str:
        text = _string(value)
        if text not in allowed:
            raise _refusal(value, f"one of {', '.join(allowed)}")
        return text

    return read


def _integer(least: int, most: int = _INT32_MAX) -> _Reader[int]:
    def read(value: Any) -> int:
        # bool is an int in Python, but true is no size.
        if type(value) is not int or not least <= value <= most:
            raise _refusal(value, f"an integer from {least} to {most}")
        return value

    return read


_SIZE = _integer(1)
_OFFSET = _integer(0)
_SHA256 = _matching("[0-9a-f]{64}", "64 lower-case hexadecimal digits")


def _schema_version(value: Any) -> int:
    version = _OFFSET(value)
    if version != SCHEMA_VERSION:
        raise _Fault(f"is {version}, but this package reads {SCHEMA_VERSION}")
    return version


def _parameter(name: str, type: ParameterType, offset: int, size: int) -> Parameter:
    if size != PARAMETER_BYTES[type]:
        raise _refusal(size, f"{PARAMETER_BYTES[type]} for type {type}", ".size")
    return Parameter(name, type, offset, size)


_read_parameters = _list(
    _object(
        _parameter,
        name=_string,
        type=_one_of(PARAMETER_BYTES),
        offset=_integer(0, _PARAMETER_BYTES_LIMIT - 8),
        size=_SIZE,
    )
)


def _parameters(value: Any) -> tuple[Parameter, ...]:
    parameters = _read_parameters(value)
    end = 0
    for found in parameters:
        if found.offset < end or found.offset % found.size:
            raise _refusal(value, f"in ascending, aligned, non-overlapping order (see {found.name!r})")
        end = found.offset + found.size
    if len({found.name for found in parameters}) != len(parameters):
        raise _refusal(value, "free of repeated names")
    return parameters


_read_capabilities = _list(_matching(r"[1-9][0-9]*\.[0-9]", "like '9.0'"))


def _capabilities(value: Any) -> tuple[str, ...]:
    capabilities = _read_capabilities(value)
    if len(set(capabilities)) != len(capabilities):
        raise _refusal(value, "free of repetitions")
    return capabilities


def _bv(value: Any) -> int | None:
    return None if value is None else _SIZE(value)


_read_artifact = _object(
    Artifact,
    kernel=_one_of(KERNELS),
    numerics=_string,
    bv=_bv,
    record_order=_one_of(RECORD_ORDERS),
    arch=_matching("sm_[0-9]+[af]?", "like sm_90a"),
    compute_capabilities=_capabilities,
    file=_matching(r"[A-Za-z0-9][A-Za-z0-9._]*\.cubin", "a plain file name ending in .cubin, without any folder"),
    size=_SIZE,
    sha256=_SHA256,
    entry=_string,
    parameters=_parameters,
    threads=_integer(1, _MOST_THREADS),
    units_per_cta=_SIZE,
    dynamic_shared_memory=_OFFSET,
    static_shared_memory=_OFFSET,
    registers=_integer(1, _MOST_REGISTERS),
    least_driver=_integer(_FIRST_DRIVER),
)


def _record(bytes: int, fields: tuple[RecordField, ...]) -> Record:
    for index, field in enumerate(fields):
        path = f".fields[{index}]"
        expected = DTYPE_BYTES[field.dtype]
        for size in field.shape:
            expected *= size
            if expected > bytes:
                raise _refusal(list(field.shape), f"inside the record's {bytes} bytes", f"{path}.shape")
        if field.bytes != expected:
            raise _refusal(field.bytes, f"{expected}, the size of {field.dtype}{list(field.shape)}", f"{path}.bytes")
        if field.offset + field.bytes > bytes:
            raise _refusal(field.offset, f"inside the record's {bytes} bytes with all of the field", f"{path}.offset")
    return Record(bytes, fields)


_read_field = _object(
    RecordField,
    name=_string,
    offset=_OFFSET,
    bytes=_SIZE,
    dtype=_one_of(DTYPE_BYTES),
    shape=_list(_SIZE),
)


def _contract(head_dim: int, chunk: int, workspace_alignment: int, record: Record) -> Contract:
    if record.bytes % workspace_alignment:
        allowed = f"a multiple of workspace_alignment ({workspace_alignment})"
        raise _refusal(record.bytes, allowed, ".record.bytes")
    return Contract(head_dim, chunk, workspace_alignment, record)


def _manifest(contract: Contract, artifacts: tuple[Artifact, ...], **rest: Any) -> Manifest:
    files: set[str] = set()
    claims: dict[tuple[str, str, str, str], str] = {}
    for index, artifact in enumerate(artifacts):
        path = f".artifacts[{index}]"
        if artifact.kernel == "prepare":
            if artifact.bv is not None:
                raise _refusal(artifact.bv, "null", f"{path}.bv")
            variant = f"record order {artifact.record_order}"
        elif artifact.bv is None or contract.head_dim % artifact.bv:
            raise _refusal(artifact.bv, f"a divisor of head_dim ({contract.head_dim})", f"{path}.bv")
        else:
            variant = f"bv {artifact.bv}"
        if artifact.file in files:
            raise _Fault(f"is not the only one: {artifact.file} is listed twice", f"{path}.file")
        files.add(artifact.file)
        for capability in artifact.compute_capabilities:
            claim = (artifact.kernel, artifact.numerics, variant, capability)
            if claim in claims:
                raise _Fault(
                    f"is ambiguous: {claims[claim]} and {artifact.file} both claim to be {artifact.kernel} "
                    f"(numerics {artifact.numerics}, {variant}) for compute capability {capability}",
                    path,
                )
            claims[claim] = artifact.file
    return Manifest(contract=contract, artifacts=artifacts, **rest)


_read_manifest = _object(
    _manifest,
    # First: another schema's fields are not ours to judge.
    schema_version=_schema_version,
    package_version=_matching(r"[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+]*", "a version like 1.2.3"),
    source_digest=_SHA256,
    toolchain=_object(
        Toolchain,
        dsl=_string,
        dsl_version=_string,
        flavour=_string,
        ptxas_version=_matching(r"[0-9]+\.[0-9]+\.[0-9]+", "a version like 1.2.3"),
        options=_list(_string),
    ),
    build_command=_string,
    contract=_object(
        _contract,
        head_dim=_SIZE,
        chunk=_SIZE,
        workspace_alignment=_SIZE,
        record=_object(_record, bytes=_SIZE, fields=_list(_read_field)),
    ),
    artifacts=_list(_read_artifact),
)
