"""Which tokens and which tiles a sequence owns (DESIGN.md section 1)."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx


def offset(cu_seqlens, index, is_int64, seqlen):
    """cu_seqlens[index] clamped to [0, seqlen], so that no value in it can lead outside the tensors."""
    value = ptx.load_index(cu_seqlens, index, is_int64)
    return Int32(ptx.min_i64(ptx.max_i64(value, Int64(0)), Int64(seqlen)))


def packed_tile_base(begin, n):
    return begin // 16 + n


def chunks_of(length):
    return (length + 15) // 16


@cute.jit
def find(cu_seqlens, tile, is_int64, num_seqs, seqlen, lane):
    """The last sequence n with packed_tile_base(n) <= tile, found by the whole warp, 32 probes a step; -1 if none."""
    first = Int32(0)
    span = num_seqs
    while span > 0:
        stride = (span + 31) // 32
        probe = first + lane * stride
        base = Int32(2**31 - 1)
        if lane * stride < span and probe < num_seqs:
            base = packed_tile_base(offset(cu_seqlens, probe, is_int64, seqlen), probe)
        hits = ptx.count_votes(tile, base)
        first += (hits - 1) * stride
        span = stride
        if stride == 1:
            span = Int32(0)
        if hits == 0:
            first = Int32(-1)
            span = Int32(0)
    return first
