"""The parallel half: one warp turns one (tile, head) into a workspace record. No barrier but the warp's own.

Lane 4a + t owns rows a and a + 8 and, in each block m of 16 channels, channels 16m + 4t ... + 3: an mma fragment, so
that decayed rows and the two 16x16 products never leave registers. Only the gate needs whole columns (a running sum
over rows): there the lane owns channels 4 * lane ... + 3 of all rows, and the two decay factors cross over through
shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .layout import EXCHANGE_BYTES, PREPARE_CTAS_PER_SM, PREPARE_SHARED_MEMORY, PREPARE_WARPS
from .record import (
    BETA,
    CHUNK,
    G_TOTAL,
    INV,
    K_BLOCKS,
    K_DECAYED,
    K_RESTORED,
    MQK,
    Q_DECAYED,
    RECORD_BYTES,
    TRIANGLE_PAIR,
)
from .sequence import chunks_of, find, offset, packed_tile_base

LOG2E = 1.4426950216293335


def load_bias(address):
    """Four fp32 that are aligned to 4 bytes only."""
    return [ptx.load_global(address + 4 * i, 1, ptx.F32) for i in range(4)]


def _load_row_pairs(address, stride, rows, lane):
    """The chunk's rows of q or k, 16 bytes a lane and two whole rows an instruction. Rows past the end: zeros, unread.

    Narrower pieces would cost the L2 more requests than the bytes are worth.
    """
    words = []
    for p in range(CHUNK // 2):
        words.append(ptx.load_global_if(rows, 2 * p + lane // 16, address, 4))
        address = address + 4 * stride  # a running address: eight of them at once would cost the registers of a row
    return words


def _copy_gates(address, stride, rows, lane, buffer):
    """The chunk's rows of g to shared memory, holding no registers on the way. Rows past the end: zeros, unread."""
    source = address + Int64(lane // 16) * (2 * stride) + Int64(lane % 16 * 16)
    for p in range(CHUNK // 2):
        inside = ptx.less(2 * p + lane // 16, rows)
        # a row that is not read still needs the address of one that exists
        ptx.copy_async_16(buffer + lane * 16, ptx.select_i64(inside, source, address), 16 * inside, 512 * p)
        source = source + 4 * stride


def _normalise(pieces, buffer, lane):
    """Rows divided by their norm, as fragments: words [block][row half][2].

    pieces[p]: 8 channels of row 2p + lane / 16. The sum of squares has a fixed order: a chain of FMAs over each run of
    8 channels (one lane's), then a butterfly over the 16 runs.
    """
    run = lane % 16
    for p, words in enumerate(pieces):
        values = [half(word) for word in words for half in (ptx.low_bf16, ptx.high_bf16)]
        total = Float32(0.0)
        for value in values:
            total = ptx.fma_f32(value, value, total)
        for distance in (8, 4, 2, 1):
            total = ptx.add_f32(total, ptx.shuffle_xor(total, distance))
        scale = ptx.rsqrt_f32(ptx.add_f32(total, Float32(1e-6)))
        scaled = [ptx.mul_f32(value, scale) for value in values]
        row = 2 * p + lane // 16
        # 32-byte pieces of a row change places with the row number, so that the reads below meet no bank conflict
        place = row * 256 + (run // 2 ^ (row & 7)) * 32 + run % 2 * 16
        ptx.store_shared(buffer + place, [ptx.pack_bf16(scaled[2 * i], scaled[2 * i + 1]) for i in range(4)])
    cute.arch.sync_warp()
    reads = buffer + lane // 4 * 256 + lane % 4 * 8
    return [[ptx.load_shared(reads + (m ^ lane // 4) * 32, 2, r * 8 * 256) for r in (0, 1)] for m in range(K_BLOCKS)]


def _gate(rows, dt_bias, a, gate_scale, exchange, lane):
    """Running gate sums G of four channels; leaves 2^G and 2^-G (bf16) in shared memory. -> their g_total.

    The rows of g stand in the second half of `exchange`: what is written for row r covers their rows 2r - 16 and
    2r - 15, which are read by then.
    """
    m, t = lane // 4, lane % 4
    gates = exchange + EXCHANGE_BYTES // 2
    total = [Float32(0.0)] * 4
    for row in range(CHUNK):
        # rows past the sequence's end add +0: their g was not read but set to 0, so the sigmoid is finite
        scale = ptx.select_less(row, rows, gate_scale)
        words = ptx.load_shared(gates + lane * 8, 2, row * 256)
        values = [half(word) for word in words for half in (ptx.low_bf16, ptx.high_bf16)]
        for i in range(4):
            z = ptx.add_f32(values[i], dt_bias[i])
            total[i] = ptx.add_f32(total[i], ptx.mul_f32(scale, ptx.sigmoid_f32(z, a)))
        decay = [ptx.ex2_f32(x) for x in total]
        growth = [ptx.ex2_neg_f32(x) for x in total]
        if row >= CHUNK // 2:
            cute.arch.sync_warp()  # all lanes have read the row
        slot = ((m ^ (row & 7)) * 4 + t) * 16
        words = (
            ptx.pack_bf16(*decay[:2]),
            ptx.pack_bf16(*decay[2:]),
            ptx.pack_bf16(*growth[:2]),
            ptx.pack_bf16(*growth[2:]),
        )
        ptx.store_shared(exchange + slot, words, row * 512)
    return decay


def _transposed(fragment):
    """Words [row half][column half] of a C/A fragment as B fragments (b0, b1) of columns 0-7 and 8-15."""
    return [(ptx.transpose(fragment[0][j]), ptx.transpose(fragment[1][j])) for j in (0, 1)]


def _multiply_f16(a, b):
    """16x16 fp16 product from A words a[row half][column half] and B fragments b -> words [row half][column half]."""
    flat = (a[0][0], a[1][0], a[0][1], a[1][1])
    columns = [ptx.mma_f16(flat, *b[j]) for j in (0, 1)]
    return [[columns[j][r] for j in (0, 1)] for r in (0, 1)]


def _inverse(raw, beta_f16, strict, diagonal, one):
    """(I + L)^-1 by the Neumann product in fp16, as bf16 words [row half][column half].

    raw: C fragments of k_decayed @ ki^T; strict, diagonal, one: masks of a diagonal 8x8 block.
    """
    zero, minus_zero = Int32(0), Int32(-0x7FFF8000)
    word = [[ptx.mul_f16(ptx.pack_f16(raw[j][2 * r], raw[j][2 * r + 1]), beta_f16[r]) for j in (0, 1)] for r in (0, 1)]
    low = [[word[0][0] & strict, zero], [word[1][0], word[1][1] & strict]]
    x = [
        [((low[r][r] ^ minus_zero) & diagonal) | one if j == r else low[r][j] ^ minus_zero for j in (0, 1)]
        for r in (0, 1)
    ]
    power = low
    for _ in range(3):
        power = _multiply_f16(power, _transposed(power))
        step = _multiply_f16(x, _transposed(power))
        x = [[ptx.add_f16(x[r][j], step[r][j]) for j in (0, 1)] for r in (0, 1)]
    return [[ptx.f16_to_bf16(x[r][j]) for j in (0, 1)] for r in (0, 1)]


def _fragment(words, order):
    """Words [row half][column half] as one mma fragment of operand A, or two of operand B (rows are its columns)."""
    (first, second), (third, fourth) = words
    return (first, third, second, fourth) if order == "a" else (first, second, third, fourth)


def _store_triangle(out, field, words, lane, order):
    """A lower triangular 16x16, words [row half][column half], without the upper right block of zeros."""
    corner, (lower, inner) = words[0][0], words[1]
    pair, rest = ((corner, lower), inner) if order == "a" else ((lower, inner), corner)
    ptx.store_global(out - Int64(8 * lane), pair, field)
    ptx.store_global(out - Int64(12 * lane), (rest,), field + TRIANGLE_PAIR)


def _store_gates(out, g_total, lane, order):
    """g_total of channels 4 * lane ... + 3."""
    if order == "b":
        ptx.store_global(out, g_total, G_TOTAL)
        return
    m, t = lane // 4, lane % 4
    at = out + Int64(m // 2 * 128 + t * 32 + m % 2 * 8 - 16 * lane)
    for i in (0, 1):
        ptx.store_global(at, (g_total[i], g_total[i + 2]), G_TOTAL + 16 * i)


def _record(
    q, q_stride, k, k_stride, g, g_stride, rows, lane, dt_bias, a_log, beta, scale, gate_scale, out, exchange, order,
):  # fmt: skip
    """All of one record but beta's sigmoid, which is returned. out: the record's address + 16 * lane."""
    a, t = lane // 4, lane % 4
    # everything is in flight before the first use; three tensors would not fit the registers: g waits in shared memory
    k_words = _load_row_pairs(k, k_stride, rows, lane)
    q_words = _load_row_pairs(q, q_stride, rows, lane)
    _copy_gates(g, g_stride, rows, lane, exchange + EXCHANGE_BYTES // 2)
    kn = _normalise(k_words, exchange, lane)
    cute.arch.sync_warp()  # the same memory again
    qn = _normalise(q_words, exchange, lane)
    dt_bias, a_log = load_bias(dt_bias), ptx.load_global(a_log, 1, ptx.F32)
    ptx.copy_async_wait()
    cute.arch.sync_warp()
    g_total = _gate(rows, dt_bias, ptx.ex2_f32(ptx.mul_f32(a_log, Float32(LOG2E))), gate_scale, exchange, lane)
    _store_gates(out, g_total, lane, order)
    cute.arch.sync_warp()

    scale_b = ptx.pack_bf16(scale, scale)
    raw, m_qk = [None, None], [None, None]
    for m in range(K_BLOCKS):
        kd, qd, ki, kr = [], [], [], []
        total = ptx.load_shared(exchange + ((m ^ 7) * 4 + t) * 16, 2, 15 * 512)  # row 15's factor is bf(g_total)
        for r in (0, 1):
            e = ptx.load_shared(exchange + a * 512 + ((m ^ a) * 4 + t) * 16, 4, r * 8 * 512)
            kd.append([ptx.mul_bf16(kn[m][r][i], e[i]) for i in (0, 1)])
            qd.append([ptx.mul_bf16(ptx.mul_bf16(qn[m][r][i], e[i]), scale_b) for i in (0, 1)])
            ki.append([ptx.mul_bf16(kn[m][r][i], e[2 + i]) for i in (0, 1)])
            kr.append([ptx.mul_bf16(ki[r][i], total[i]) for i in (0, 1)])
        for j in (0, 1):
            raw[j] = ptx.mma_bf16((kd[0][0], kd[1][0], kd[0][1], kd[1][1]), *ki[j], raw[j])
            m_qk[j] = ptx.mma_bf16((qd[0][0], qd[1][0], qd[0][1], qd[1][1]), *ki[j], m_qk[j])
        restored = [[ptx.transpose(kr[half][j]) for half in (0, 1)] for j in (0, 1)]
        for field, words in ((K_DECAYED, kd), (Q_DECAYED, qd), (K_RESTORED, restored)):
            ptx.store_global(out, _fragment(words, order), field + 512 * m)

    # masks of a diagonal 8x8 block for this lane's two columns 2t, 2t + 1 in row a
    strict = ptx.half_mask(2 * t - a, 2 * t + 1 - a, "lt")
    equal = ptx.half_mask(2 * t - a, 2 * t + 1 - a, "eq")
    sigmoid = ptx.sigmoid_f32(beta)
    beta_f16 = [ptx.shuffle(ptx.pack_f16(sigmoid, sigmoid), a + 8 * r) for r in (0, 1)]
    inv = _inverse(raw, beta_f16, strict, ~equal, equal & 0x3C003C00)
    _store_triangle(out, INV, inv, lane, order)
    keep = strict | equal
    mqk = [[ptx.pack_bf16(m_qk[j][2 * r], m_qk[j][2 * r + 1]) for j in (0, 1)] for r in (0, 1)]
    _store_triangle(out, MQK, [[mqk[0][0] & keep], [mqk[1][0], mqk[1][1] & keep]], lane, order)
    return sigmoid


def trace(spec):
    @cute.kernel
    def prepare(
        q: Int64, k: Int64, g: Int64, beta: Int64, A_log: Int64, dt_bias: Int64, cu_seqlens: Int64, workspace: Int64,
        q_stride_b: Int64, q_stride_t: Int64, q_stride_h: Int64,
        k_stride_b: Int64, k_stride_t: Int64, k_stride_h: Int64,
        g_stride_b: Int64, g_stride_t: Int64, g_stride_h: Int64,
        beta_stride_b: Int64, beta_stride_t: Int64, beta_stride_h: Int64,
        seqlen: Int32, num_seqs: Int32, num_heads: Int32, total_tiles: Int32, cu_seqlens_is_int64: Int32,
        scale: Float32, gate_scale: Float32,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        # consecutive tiles of one head, in a CTA and from CTA to CTA: what is written at a time is one run of memory
        cta = cute.arch.block_idx()[0]
        groups = (total_tiles + PREPARE_WARPS - 1) // PREPARE_WARPS
        head = cta // groups
        tile = cta % groups * PREPARE_WARPS + warp

        n = Int32(0)
        batch = Int32(0)
        begin = Int32(0)
        end = seqlen
        first_tile = Int32(0)
        if cu_seqlens != Int64(0):
            n = find(cu_seqlens, tile, cu_seqlens_is_int64, num_seqs, seqlen, lane)
            if n >= 0:
                begin = offset(cu_seqlens, n, cu_seqlens_is_int64, seqlen)
                end = offset(cu_seqlens, n + 1, cu_seqlens_is_int64, seqlen)
                first_tile = packed_tile_base(begin, n)
            else:
                end = Int32(0)
        else:
            batch = tile // chunks_of(seqlen)
            first_tile = batch * chunks_of(seqlen)
        begin += (tile - first_tile) * CHUNK
        rows = end - begin
        if tile >= total_tiles:
            rows = Int32(0)
        if rows > 0:
            gates = g + 2 * (Int64(batch) * g_stride_b + Int64(begin) * g_stride_t + Int64(head) * g_stride_h)
            row, channel = lane // 16, 8 * (lane % 16)
            queries = q + 2 * (
                Int64(batch) * q_stride_b + Int64(begin + row) * q_stride_t + Int64(head) * q_stride_h + Int64(channel)
            )
            keys = k + 2 * (
                Int64(batch) * k_stride_b + Int64(begin + row) * k_stride_t + Int64(head) * k_stride_h + Int64(channel)
            )
            token = lane % 16
            betas = beta + 2 * (
                Int64(batch) * beta_stride_b + Int64(begin + token) * beta_stride_t + Int64(head) * beta_stride_h
            )

            bias = dt_bias + 4 * Int64(head * 128 + 4 * lane)
            a_log = A_log + 4 * Int64(head)
            beta_value = ptx.load_global_bf16_if(rows, token, betas)
            out = workspace + (Int64(head) * Int64(total_tiles) + Int64(tile)) * RECORD_BYTES + Int64(16 * lane)
            exchange = cute.arch.get_dyn_smem(cutlass.Int8, 128).toint() + warp * EXCHANGE_BYTES
            sigmoid = _record(
                queries, q_stride_t, keys, k_stride_t, gates, g_stride_t, rows, lane, bias, a_log, beta_value,
                scale, gate_scale, out, exchange, spec.record_order,
            )  # fmt: skip
            if lane < 16:
                if token >= rows:
                    sigmoid = Float32(0.0)
                position = 4 * (token % 8 // 2) + 2 * (token // 8) + token % 2
                if cutlass.const_expr(spec.record_order == "a"):
                    position = 2 * (token % 8) + token // 8
                ptx.store_global_low_half(out + Int64(BETA + 2 * position - 16 * lane), ptx.pack_bf16(sigmoid, sigmoid))

    @cute.jit
    def host(
        q: Int64, k: Int64, g: Int64, beta: Int64, A_log: Int64, dt_bias: Int64, cu_seqlens: Int64, workspace: Int64,
        q_stride_b: Int64, q_stride_t: Int64, q_stride_h: Int64,
        k_stride_b: Int64, k_stride_t: Int64, k_stride_h: Int64,
        g_stride_b: Int64, g_stride_t: Int64, g_stride_h: Int64,
        beta_stride_b: Int64, beta_stride_t: Int64, beta_stride_h: Int64,
        seqlen: Int32, num_seqs: Int32, num_heads: Int32, total_tiles: Int32, cu_seqlens_is_int64: Int32,
        scale: Float32, gate_scale: Float32,
    ):  # fmt: skip
        prepare(
            q, k, g, beta, A_log, dt_bias, cu_seqlens, workspace,
            q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
            g_stride_b, g_stride_t, g_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
            seqlen, num_seqs, num_heads, total_tiles, cu_seqlens_is_int64, scale, gate_scale,
        ).launch(
            grid=(1, 1, 1), block=(32 * PREPARE_WARPS, 1, 1), smem=PREPARE_SHARED_MEMORY,
            min_blocks_per_mp=PREPARE_CTAS_PER_SM,
            preferred_smem_carveout=100,  # the DSL would ask the driver for one
        )  # fmt: skip

    return host, (*[Int64(0)] * 20, *[Int32(0)] * 5, *[Float32(0)] * 2)
