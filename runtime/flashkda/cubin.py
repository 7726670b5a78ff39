"""What a cubin says of itself, as far as the manifest must agree with it: its kernel, parameters and architecture.

A cubin is an ELF file. Each kernel has a section .nv.info.<entry> of attributes, one of them for every parameter.
"""

import struct

from flashkda.errors import ArtifactError
from flashkda.manifest import Artifact

_EM_CUDA = 190
# Attributes whose format is EIFMT_SVAL hold a 16-bit size and as many bytes, all others 16 bits.
_EIFMT_SVAL = 4
_EIATTR_KPARAM_INFO = 0x17
# Since this version of the ELF ABI (Blackwell) the SM number is one byte further up in the flags.
_SM_IN_SECOND_BYTE = 8


def check_cubin(artifact: Artifact, data: bytes, remedy: str) -> None:
    """Raise `ArtifactError` unless the cubin is for the artifact's architecture and has its kernel and parameters.

    remedy: what to do about it, for the error.
    """
    try:
        sm, parameters = _read(data, artifact.entry)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise ArtifactError(
            f"{artifact.file} is no readable cubin with the kernel {artifact.entry} ({error}); {remedy}"
        ) from error
    wanted = int(artifact.arch.removeprefix("sm_").rstrip("af"))
    if sm != wanted:
        raise ArtifactError(f"{artifact.file} is compiled for sm_{sm}, but the manifest says {artifact.arch}; {remedy}")
    listed = tuple((parameter.offset, parameter.size) for parameter in artifact.parameters)
    if parameters != listed:
        raise ArtifactError(
            f"{artifact.file} takes parameters of (offset, size) {parameters}, but the manifest says {listed}; {remedy}"
        )


def _read(data: bytes, entry: str) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The SM number, and offset and size of each parameter of the kernel."""
    magic, abi_version, machine = struct.unpack_from("<4s4xB9xH", data)
    if magic != b"\x7fELF" or machine != _EM_CUDA:
        raise ValueError("it is no ELF file for CUDA")
    flags, size, count, names = struct.unpack_from("<48xI6xHHH", data)
    (table,) = struct.unpack_from("<40xQ", data)
    # Of each section: where its name is, and its bytes.
    sections = [struct.unpack_from("<I20xQQ", data, table + size * index) for index in range(count)]
    _, start, length = sections[names]
    strings = data[start : start + length]
    wanted = f".nv.info.{entry}".encode()
    for name, start, length in sections:
        if strings[name : strings.index(0, name)] == wanted:
            sm = flags >> 8 if abi_version >= _SM_IN_SECOND_BYTE else flags
            return sm & 0xFF, _parameters(data[start : start + length])
    raise ValueError("there is no such kernel in it")


def _parameters(attributes: bytes) -> tuple[tuple[int, int], ...]:
    found = {}
    at = 0
    while at < len(attributes):
        form, attribute, value = struct.unpack_from("<BBH", attributes, at)
        at += 4
        if form == _EIFMT_SVAL:
            if attribute == _EIATTR_KPARAM_INFO:
                ordinal, offset, packed = struct.unpack_from("<4xHHI", attributes, at)
                found[ordinal] = (offset, packed >> 18)
            at += value
    return tuple(found[ordinal] for ordinal in sorted(found))
