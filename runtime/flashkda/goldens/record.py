"""The workspace record in plain arrays: undoes, and redoes, the fragment order in which the kernels store it.

Matrices lie in the order of mma.m16n8k16 fragments, by the record order those of operand A or B: lane = 4*a + t, 32-bit
word r of the lane's four, half e of the word. Of the lower triangular ones, inv and mqk, only three 8x8 blocks are
stored. Values are bits: bf16 as uint16, fp32 as uint32.
"""

from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashkda.goldens.cases import CHUNK, HEAD_DIM, Case
from flashkda.manifest import Record

Bits: TypeAlias = "NDArray[np.generic]"

_WORDS: dict[str, type[np.uint16] | type[np.uint32]] = {"bf16": np.uint16, "fp32": np.uint32}
_PAST_END = ("q_decayed", "mqk")
_TRIANGLES = ("inv", "mqk")
_UPPER_RIGHT = (np.arange(CHUNK)[:, None] < 8) & (np.arange(CHUNK) >= 8)
#: What the recording left in tiles that no sequence owns.
_UNWRITTEN = 0xABABABAB


def plain_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a field's array; `shape` is that of what is stored, without blocks of zeros."""
    return (CHUNK, CHUNK) if name in _TRIANGLES else shape


@cache
def stored_order(name: str, shape: tuple[int, ...], record_order: str) -> NDArray[np.intp]:
    """For each stored element of a field, its flat index in the row-major array of `plain_shape`."""
    if name in _TRIANGLES:
        a, t, e = np.indices((8, 4, 2))
        corner = CHUNK * a + 2 * t + e
        lower = corner + CHUNK * 8
        inner = lower + 8
        # Two blocks side by side, 8 bytes a lane, then the third.
        pair, rest = ((corner, lower), inner) if record_order == "a" else ((lower, inner), corner)
        return np.concatenate([np.stack(pair, axis=2).ravel(), rest.ravel()])
    if name == "g_total":
        if record_order == "b":
            return np.arange(HEAD_DIM)
        pair_of_blocks, t, i, m, j = np.indices((HEAD_DIM // 32, 4, 2, 2, 2))
        return (32 * pair_of_blocks + 16 * m + 4 * t + i + 2 * j).ravel()
    if name == "beta_sigmoid":
        if record_order == "b":
            t, h, e = np.indices((4, 2, 2))
            return (2 * t + e + 8 * h).ravel()
        a, h = np.indices((8, 2))
        return (a + 8 * h).ravel()
    m, a, t, r, e = np.indices((HEAD_DIM // 16, 8, 4, 4, 2))
    # A fragment's words go down the rows first, those of two B fragments along them.
    rows, columns = (r & 1, r >> 1) if record_order == "a" else (r >> 1, r & 1)
    if name == "k_restored":  # transposed
        row, column = 2 * t + e + 8 * columns, 16 * m + 4 * (a >> 1) + 2 * rows + (a & 1)
    else:
        row, column = a + 8 * rows, 16 * m + 4 * t + 2 * columns + e
    return (row * shape[1] + column).ravel()


def decode_records(raw: NDArray[np.uint8], record: Record, record_order: str) -> dict[str, Bits]:
    """Bytes of n records -> the record's arrays by field name, each [n, *plain_shape]."""
    rows = np.ascontiguousarray(raw).reshape(-1, record.bytes)
    arrays: dict[str, Bits] = {}
    for field in record.fields:
        stored = np.ascontiguousarray(rows[:, field.offset : field.offset + field.bytes]).view(_WORDS[field.dtype])
        shape = plain_shape(field.name, field.shape)
        plain = np.zeros((len(rows), int(np.prod(shape))), dtype=stored.dtype)
        plain[:, stored_order(field.name, field.shape, record_order)] = stored
        arrays[field.name] = plain.reshape(len(rows), *shape)
    return arrays


def encode_records(arrays: dict[str, Bits], record: Record, record_order: str) -> NDArray[np.uint8]:
    """The inverse of `decode_records`; bytes between fields are zero."""
    count = len(next(iter(arrays.values())))
    rows: NDArray[np.uint8] = np.zeros((count, record.bytes), dtype=np.uint8)
    for field in record.fields:
        plain = arrays[field.name].reshape(count, -1)
        stored = np.ascontiguousarray(plain[:, stored_order(field.name, field.shape, record_order)])
        rows[:, field.offset : field.offset + field.bytes] = stored.view(np.uint8)
    return rows.reshape(-1)


def tile_bases(case: Case) -> tuple[list[int], int]:
    """First tile of every sequence and the number of tiles, as this package numbers them."""
    if case.cu_seqlens is None:
        per_sequence = -(-case.T // CHUNK)
        return [n * per_sequence for n in range(case.B)], case.B * per_sequence
    sequences = case.sequences
    return [start // CHUNK + n for n, (start, _) in enumerate(sequences)], case.T // CHUNK + len(sequences)


def as_recorded(case: Case, decoded: dict[str, Bits]) -> dict[str, Bits]:
    """Decoded records of a call -> the arrays that the digests are of, each [H, tiles, *shape].

    The original numbers tiles without gaps and leaves the unused ones at the end; rows past a sequence's end are not
    part of the contract (q_decayed, mqk) and are zeroed. Its inv has the block of zeros too, and there a NaN takes the
    whole matrix. beta_sigmoid is this package's own and has no counterpart.
    """
    bases, tiles = tile_bases(case)
    recorded_tiles = tiles if case.cu_seqlens is None else -(-case.T // CHUNK) + len(case.sequences)
    arrays: dict[str, Bits] = {}
    for name, array in decoded.items():
        if name == "beta_sigmoid":
            continue
        ours = array.reshape(case.H, tiles, *array.shape[1:])
        if name == "inv":
            ours = ours.copy()
            ours[(ours[..., :1, :1] & 0x7FFF > 0x7F80) & _UPPER_RIGHT] = 0x7FFF
        dense = np.full((case.H, recorded_tiles, *array.shape[1:]), 0, dtype=array.dtype)
        dense[...] = np.array(_UNWRITTEN & np.iinfo(array.dtype).max, dtype=array.dtype)
        tile = 0
        for base, (start, end) in zip(bases, case.sequences, strict=True):
            count = -(-(end - start) // CHUNK)
            dense[:, tile : tile + count] = ours[:, base : base + count]
            tile += count
            past_end = (end - start) % CHUNK
            if past_end and name in _PAST_END:
                dense[:, tile - 1, past_end:] = 0
        arrays[name] = dense
    return arrays
