"""The serial half: one CTA owns BV value columns of one (sequence, head); their state stays in registers throughout.

A loader warp keeps a ring of records and tiles of V full; each compute warp owns 8, 16 or 32 of the columns (columns.py
has their arithmetic) and shares nothing with the others but the ring.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx
from .columns import EightColumns, SixteenColumns
from .layout import BARRIER_BYTES, RecurrenceLayout
from .record import HEAD_DIM, K_BLOCKS, RECORD_BYTES
from .sequence import WARP, chunks_of, longest_first, offset, packed_tile_base

AHEAD = 2  # stages beyond its chunk's that a compute warp waits for: of the next it computes, of one more it has asked
V_IN_FLIGHT = 3  # stages whose V the loader waits for later than it asks for it


def _elements(layout, m):
    """Where a lane's part of block m of key channels lies in a state: (block, row of it / 8, element)."""
    rows = layout.columns // 8
    return [(b, r, (b * rows + r) * 8 * HEAD_DIM + 16 * m) for b in range(layout.blocks) for r in range(rows)]


def trace(spec):
    layout = RecurrenceLayout(spec.bv)
    STAGES = layout.stages
    form = EightColumns if layout.columns == 8 else SixteenColumns

    @cute.jit
    def load_state(state, address, first, dtype):
        """The lane's part of the state at `address`, whose element `first` is its first; dtype 0 is the zero state."""
        for i in cutlass.range_constexpr(2 * layout.columns * layout.blocks):
            state[i] = Int32(0)
        if dtype == 1:
            at = address + 2 * first
            for m in cutlass.range_constexpr(K_BLOCKS):
                for b, r, element in _elements(layout, m):
                    lo, hi = ptx.load_global(at, 2, offset=2 * element)
                    form.put_channels(state, b, r, m, lo, hi)
        if dtype == 2:
            at = address + 4 * first
            for m in cutlass.range_constexpr(K_BLOCKS):
                for b, r, element in _elements(layout, m):
                    x = ptx.load_global(at, 4, ptx.F32, 4 * element)
                    form.put_channels(state, b, r, m, ptx.pack_bf16(x[0], x[1]), ptx.pack_bf16(x[2], x[3]))

    def store_block(at, dtype, zero, m, operands):
        """Block m of the lane's part of a state, from the state's address `at` on."""
        for b, r, element in _elements(layout, m):
            lo, hi = form.channels(operands[b], r, zero)
            if dtype == 1:
                ptx.store_global(at, (lo, hi), 2 * element)
            else:
                x = (ptx.low_bf16(lo), ptx.high_bf16(lo), ptx.low_bf16(hi), ptx.high_bf16(hi))
                ptx.store_global(at, x, 4 * element)

    @cute.jit
    def store_state(state, at, dtype, zero):
        """The lane's part of a state, from address `at` on; dtype 0 stores nothing."""
        words = layout.columns // 4
        blocks = []
        for m in cutlass.range_constexpr(K_BLOCKS):
            first = [words * (K_BLOCKS * b + m) for b in range(layout.blocks)]
            blocks.append([form.operand([state[i + j] for j in range(words)]) for i in first])
        if dtype == 1:
            for m in cutlass.range_constexpr(K_BLOCKS):
                store_block(at, 1, zero, m, blocks[m])
        if dtype == 2:
            for m in cutlass.range_constexpr(K_BLOCKS):
                store_block(at, 2, zero, m, blocks[m])

    @cute.kernel
    def recurrence(
        v: Int64, out: Int64, workspace: Int64, initial_state: Int64, final_state: Int64, cu_seqlens: Int64,
        state_indices: Int64, has_initial_state: Int64, checkpoints: Int64, checkpoint_cu_starts: Int64,
        v_stride_b: Int64, v_stride_t: Int64, v_stride_h: Int64,
        out_stride_b: Int64, out_stride_t: Int64, out_stride_h: Int64,
        initial_stride_n: Int64, final_stride_n: Int64, checkpoint_stride_n: Int64,
        seqlen: Int32, num_seqs: Int32, num_heads: Int32, total_tiles: Int32,
        cu_seqlens_is_int64: Int32, initial_dtype: Int32, final_dtype: Int32,
        state_indices_is_int64: Int32, num_slots: Int32,
        checkpoint_dtype: Int32, num_checkpoints: Int32, checkpoint_chunks: Int32, checkpoint_starts_is_int64: Int32,
    ):  # fmt: skip
        cta = cute.arch.block_idx()[0]
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        a, t = lane // 4, lane % 4

        column = cta % layout.slices * layout.bv
        head = cta // layout.slices % num_heads
        n = cta // layout.slices // num_heads
        packed = cu_seqlens != Int64(0)
        if packed and num_seqs <= WARP:
            n = longest_first(cu_seqlens, n, cu_seqlens_is_int64, num_seqs, seqlen, lane)
        begin = offset(cu_seqlens, n, cu_seqlens_is_int64, seqlen)
        length = offset(cu_seqlens, n + 1, cu_seqlens_is_int64, seqlen) - begin
        batch = Int32(0)
        tile = packed_tile_base(begin, n)
        if not packed:
            length = seqlen
            batch = n
            tile = n * chunks_of(seqlen)
        chunks = chunks_of(length)
        slot = n
        if state_indices != Int64(0):
            index = ptx.load_index(state_indices, n, state_indices_is_int64)
            slot = Int32(index)
            if ptx.outside(index, num_slots) != 0:  # a padding request: no state of it is read or written, no token
                length = Int32(-1)
                initial_dtype = Int32(0)
                final_dtype = Int32(0)
        if ptx.load_flag(has_initial_state, n) == 0:
            initial_dtype = Int32(0)
        if length < 0:
            length = Int32(0)
            chunks = Int32(0)

        shared = ptx.opaque(cute.arch.get_dyn_smem(cutlass.Int8, 128).toint())
        full, empty, ring = shared, shared + 8 * STAGES, shared + BARRIER_BYTES
        if thread == 0:
            for i in cutlass.range_constexpr(STAGES):
                ptx.barrier_init(full + 8 * i, 33)  # the loader's lanes, and the bulk copy's expect_tx
                ptx.barrier_init(empty + 8 * i, 32 * layout.warps)
            ptx.barrier_init_fence()
        cute.arch.sync_threads()

        if cutlass.const_expr(layout.loader_registers > 0) and warp >= layout.warps:
            ptx.fewer_registers(layout.loader_registers)
        if warp == layout.warps:
            # ---- loader: keeps the ring of records and V tiles full
            record = workspace + (Int64(head) * Int64(total_tiles) + Int64(tile)) * RECORD_BYTES
            values = v + 2 * (
                Int64(batch) * v_stride_b + Int64(begin) * v_stride_t + Int64(head) * v_stride_h + Int64(column)
            )
            pieces = layout.bv // 8  # 16-byte pieces a row
            slot = Int32(0)
            parity = Int32(1)
            landed = full  # the barrier of the first stage that this warp has not yet arrived on
            end = full + 8 * STAGES
            for c in cutlass.range(chunks + AHEAD, unroll=1):
                stage = ring + slot * layout.stage
                ptx.barrier_wait(empty + 8 * slot, parity)
                if c < chunks:
                    if lane == 0:
                        ptx.barrier_arrive_expect(full + 8 * slot, RECORD_BYTES)
                        ptx.copy_bulk(stage, record, RECORD_BYTES, full + 8 * slot)
                    rows = length - 16 * c
                    for i in cutlass.range_constexpr((16 * pieces + 31) // 32):
                        row = (lane + 32 * i) // pieces
                        piece = (lane + 32 * i) % pieces
                        source, size = row, Int32(16)
                        if row >= rows:  # not this sequence's: zeros, and the address of a row that exists
                            source, size = Int32(0), Int32(0)
                        ptx.copy_async_16(
                            stage + RECORD_BYTES + row * layout.value_pitch + piece * 16,
                            values + 2 * Int64(source) * v_stride_t + Int64(piece) * 16, size,
                        )  # fmt: skip
                elif lane == 0:
                    # past the last chunk the compute warps read stale operands, unused
                    ptx.barrier_arrive(full + 8 * slot)
                ptx.copy_async_commit()
                if c >= V_IN_FLIGHT:
                    ptx.copy_async_wait(V_IN_FLIGHT)
                    ptx.barrier_arrive(landed)
                    landed += 8
                    if landed == end:
                        landed = full
                record += RECORD_BYTES
                values += 32 * v_stride_t
                slot += 1
                if slot == STAGES:
                    slot = Int32(0)
                    parity ^= 1
            ptx.copy_async_wait()
            left = chunks + AHEAD
            if left > V_IN_FLIGHT:
                left = Int32(V_IN_FLIGHT)
            for _ in cutlass.range(left, unroll=1):
                ptx.barrier_arrive(landed)
                landed += 8
                if landed == end:
                    landed = full
        if warp < layout.warps:
            if cutlass.const_expr(layout.compute_registers > 0):
                ptx.more_registers(layout.compute_registers)
            state = cute.make_rmem_tensor(2 * layout.columns * layout.blocks, Int32)
            own = column + warp * layout.columns * layout.blocks
            zero = initial_dtype >> 2
            # lane (a, t) holds rows a, a + 8, ... of each block, and key channels 16m + 4t ... + 3
            within = Int64(head) * (HEAD_DIM * HEAD_DIM) + Int64(own * HEAD_DIM + a * HEAD_DIM + 4 * t)
            load_state(state, initial_state, Int64(slot) * initial_stride_n + within, initial_dtype)

            if chunks > 0:
                columns = form(layout, warp, lane, state)
                start, step = columns.start, columns.step

                ptx.barrier_wait(full, Int32(0))
                start(ring)
                out_row = out + 2 * (
                    Int64(batch) * out_stride_b
                    + Int64(begin + a) * out_stride_t
                    + Int64(head) * out_stride_h
                    + Int64(own + 2 * t)
                )
                out_half = 16 * out_stride_t
                last = ring + (STAGES - 1) * layout.stage
                stage, ahead = ring, ring + layout.stage
                stage_full, ahead_full = full, full + 8
                parity = Int32(0)
                # Checkpoint 0 is stored here, each other by the chunk that makes it: a turn is `count` chunks and one
                # that stores, for each dtype in code of its own. Then the rest: without checkpoints, all whole chunks.
                # So the chunk is in the code six times, because a branch between two loops costs like three stores.
                turns, count, rest = Int32(0), Int32(0), length // 16
                element_bytes = Int64(checkpoint_dtype) * 2
                checkpoint, checkpoint_bytes = checkpoints, element_bytes * checkpoint_stride_n
                if checkpoint_dtype != 0:
                    rows = (chunks + checkpoint_chunks - 1) // checkpoint_chunks
                    row, row_end = n * rows, (n + 1) * rows
                    if checkpoint_cu_starts != Int64(0):
                        # may begin before row 0; no sequence has 2**30 checkpoints
                        row = offset(checkpoint_cu_starts, n, checkpoint_starts_is_int64, num_checkpoints, -(2**30))
                        row_end = offset(checkpoint_cu_starts, n + 1, checkpoint_starts_is_int64, num_checkpoints)
                    if row_end > num_checkpoints:
                        row_end = num_checkpoints
                    checkpoint += element_bytes * (Int64(row) * checkpoint_stride_n + within)
                    if row >= 0 and row < row_end:
                        store_state(state, checkpoint, checkpoint_dtype, zero)
                    begin_store, end_store = Int32(1), rows
                    if begin_store < -row:
                        begin_store = -row
                    if end_store > row_end - row:
                        end_store = row_end - row
                    if begin_store < end_store:
                        turns = end_store - begin_store
                        count = begin_store * checkpoint_chunks - 1
                        rest -= (end_store - 1) * checkpoint_chunks
                        checkpoint += checkpoint_bytes * Int64(begin_store)
                turns_fp32 = Int32(0)
                if checkpoint_dtype == 2:
                    turns_fp32 = turns
                turns_bf16 = turns - turns_fp32
                ptx.barrier_wait(ahead_full, parity)
                for turns, runs in ((turns_bf16, (0, 1)), (turns_fp32, (0, 2)), (Int32(1), (0,))):
                    if cutlass.const_expr(len(runs) == 1):
                        count = rest
                    for _ in cutlass.range(turns, unroll=1):
                        for stored_dtype in runs:
                            times = Int32(1) if stored_dtype else count
                            for _ in cutlass.range(times, unroll=1):
                                next_stage, next_full = ahead + layout.stage, ahead_full + 8
                                if ahead == last:
                                    next_stage, next_full = ring, full
                                    parity ^= 1
                                keep = partial(store_block, checkpoint, stored_dtype, zero) if stored_dtype else None
                                ready = step(stage, ahead, next_full, parity, out_row, out_half, None, keep)
                                ptx.barrier_arrive(stage_full + 8 * STAGES)
                                out_row += 2 * out_half
                                stage, stage_full = ahead, ahead_full
                                ahead, ahead_full = next_stage, next_full
                                if cutlass.const_expr(stored_dtype > 0):
                                    checkpoint += checkpoint_bytes
                                # At the very end: anywhere else the answer would be waited for, or split the schedule.
                                if ready == 0:
                                    ptx.barrier_wait(next_full, parity)
                        count = checkpoint_chunks - 1
                if length % 16 > 0:
                    step(stage, ahead, full, parity, out_row, out_half, length % 16)

            final = Int64(slot) * final_stride_n + within
            store_state(state, final_state + 2 * Int64(final_dtype) * final, final_dtype, zero)

    @cute.jit
    def host(
        v: Int64, out: Int64, workspace: Int64, initial_state: Int64, final_state: Int64, cu_seqlens: Int64,
        state_indices: Int64, has_initial_state: Int64, checkpoints: Int64, checkpoint_cu_starts: Int64,
        v_stride_b: Int64, v_stride_t: Int64, v_stride_h: Int64,
        out_stride_b: Int64, out_stride_t: Int64, out_stride_h: Int64,
        initial_stride_n: Int64, final_stride_n: Int64, checkpoint_stride_n: Int64,
        seqlen: Int32, num_seqs: Int32, num_heads: Int32, total_tiles: Int32,
        cu_seqlens_is_int64: Int32, initial_dtype: Int32, final_dtype: Int32,
        state_indices_is_int64: Int32, num_slots: Int32,
        checkpoint_dtype: Int32, num_checkpoints: Int32, checkpoint_chunks: Int32, checkpoint_starts_is_int64: Int32,
    ):  # fmt: skip
        recurrence(
            v, out, workspace, initial_state, final_state, cu_seqlens,
            state_indices, has_initial_state, checkpoints, checkpoint_cu_starts,
            v_stride_b, v_stride_t, v_stride_h, out_stride_b, out_stride_t, out_stride_h,
            initial_stride_n, final_stride_n, checkpoint_stride_n,
            seqlen, num_seqs, num_heads, total_tiles, cu_seqlens_is_int64, initial_dtype, final_dtype,
            state_indices_is_int64, num_slots,
            checkpoint_dtype, num_checkpoints, checkpoint_chunks, checkpoint_starts_is_int64,
        ).launch(
            grid=(1, 1, 1), block=(layout.threads, 1, 1), smem=layout.shared_memory,
            min_blocks_per_mp=layout.schedule.launch_bound,
            preferred_smem_carveout=100,  # the DSL would ask the driver for one
        )  # fmt: skip

    return host, (*[Int64(0)] * 19, *[Int32(0)] * 13)
