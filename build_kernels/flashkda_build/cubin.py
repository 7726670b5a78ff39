"""Reads a cubin's own account of its kernel: entry, parameters, registers, shared memory, ptxas. Needs no driver."""

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from .errors import BuildError

EM_CUDA = 190
# Attributes of .nv.info sections; named after the EIATTR_* constants that cuobjdump -elf prints.
REQNTID, FRAME_SIZE, KPARAM_INFO, REGCOUNT, CUDA_API_VERSION = 0x10, 0x11, 0x17, 0x2F, 0x37
EIFMT_SVAL = 4  # a 16-bit size and as many bytes; every other format holds its value in those 16 bits
# ptxas counts the 1 KiB that the system reserves in each CTA's shared memory into .nv.shared.<entry>.
RESERVED_SHARED_MEMORY = 1024


@dataclass(frozen=True)
class Cubin:
    """What one kernel's cubin says of itself.

    parameters: (offset, size) in bytes, in launch order. threads: a CTA (.reqntid), None if the kernel does not fix it.
    registers: a thread. static_shared_memory, frame: bytes (frame: local memory a thread). sm: 90, 100, 103.
    cuda_version: 129 for 12.9. ptxas_version: e.g. "12.9.83", None for ELF versions that do not record it.
    """

    entry: str
    parameters: tuple[tuple[int, int], ...]
    threads: int | None
    registers: int
    static_shared_memory: int
    frame: int
    sm: int
    cuda_version: int
    ptxas_version: str | None


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == EIFMT_SVAL:
            yield attribute, data[at : at + value]
            at += value
        else:
            yield attribute, struct.pack("<H", value)


def _of_kernel(attributes: list[tuple[int, bytes]], wanted: int, symbol: int) -> int:
    """Value of an attribute of .nv.info that is kept as (symbol number, value) pairs."""
    for attribute, data in attributes:
        if attribute == wanted:
            number, value = struct.unpack("<II", data)
            if number == symbol:
                return int(value)
    raise BuildError(f"the cubin's .nv.info has no attribute 0x{wanted:02x} for symbol {symbol}")


def read_cubin(data: bytes) -> Cubin:
    """Raises BuildError unless `data` is a cubin with exactly one kernel."""
    try:
        return _read(data)
    except (ELFError, struct.error, KeyError, AttributeError) as error:
        raise BuildError(
            f"these {len(data)} bytes are not a readable cubin ({type(error).__name__}: {error})"
        ) from error


def _read(data: bytes) -> Cubin:
    elf = ELFFile(io.BytesIO(data))
    if elf.header.e_machine not in (EM_CUDA, "EM_CUDA"):
        raise BuildError(f"this ELF file is for {elf.header.e_machine}, not for CUDA; a cubin is wanted")
    sections = {section.name: section for section in elf.iter_sections()}
    entries = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    if len(entries) != 1:
        raise BuildError(
            f"a cubin with one kernel is wanted, this one has {len(entries)}: {', '.join(entries) or 'none'}"
        )
    (entry,) = entries
    symbols = sections[".symtab"]
    symbol = next(
        i for i, s in enumerate(symbols.iter_symbols()) if s.name == entry and s.entry.st_info.type == "STT_FUNC"
    )
    shared = list(_attributes(sections[".nv.info"].data()))
    own = list(_attributes(sections[f".nv.info.{entry}"].data()))

    parameters = {}
    for attribute, value in own:
        if attribute == KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            parameters[ordinal] = (offset, packed >> 18)
    reqntid = [struct.unpack("<III", value) for attribute, value in own if attribute == REQNTID]
    section = sections.get(f".nv.shared.{entry}")
    note = sections.get(".note.nv.tkinfo")
    version = re.search(rb"V(\d+\.\d+\.\d+)", note.data()) if note else None
    flags = elf.header.e_flags
    return Cubin(
        entry=entry,
        parameters=tuple(parameters[i] for i in range(len(parameters))),
        threads=reqntid[0][0] * reqntid[0][1] * reqntid[0][2] if reqntid else None,
        registers=_of_kernel(shared, REGCOUNT, symbol),
        static_shared_memory=max(0, section["sh_size"] - RESERVED_SHARED_MEMORY) if section else 0,
        frame=_of_kernel(shared, FRAME_SIZE, symbol),
        # ELF ABI version 8 (Blackwell) moved the SM number up one byte.
        sm=(flags >> 8) & 0xFF if elf.header.e_ident.EI_ABIVERSION >= 8 else flags & 0xFF,
        cuda_version=next(struct.unpack("<I", value)[0] for attribute, value in own if attribute == CUDA_API_VERSION),
        ptxas_version=version[1].decode() if version else None,
    )
