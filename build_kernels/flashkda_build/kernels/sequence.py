"""Which tokens and which tiles a sequence owns (DESIGN.md section 1)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx


def offset(cu_seqlens, index, is_int64, most, least=0):
    """cu_seqlens[index] clamped to [least, most], so that no value in it can lead outside the tensors."""
    value = ptx.load_index(cu_seqlens, index, is_int64)
    return Int32(ptx.min_i64(ptx.max_i64(value, Int64(least)), Int64(most)))


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


WARP = 32


@cute.jit
def longest_first(cu_seqlens, place, is_int64, num_seqs, seqlen, lane):
    """Which of up to 32 sequences is number `place` by falling number of chunks, sorted by the whole warp.

    CTAs start in the order of their numbers: the longest chains must not be the last to start, nor share an SM.
    """
    key = -1 - lane  # no sequence
    if lane < num_seqs:
        begin = offset(cu_seqlens, lane, is_int64, seqlen)
        end = offset(cu_seqlens, lane + 1, is_int64, seqlen)
        chunks = Int32(0)
        if end > begin:
            chunks = chunks_of(end - begin)
        key = chunks * WARP + (WARP - 1 - lane)
    ahead = Int32(0)
    for other in cutlass.range_constexpr(WARP):
        ahead += ptx.less(key, ptx.shuffle(key, Int32(other)))
    return ptx.lane_where_equal(ahead, place)
