"""A compute warp's value columns: the arithmetic of one chunk, in two forms with the same bits.

    u1[t,v] = k_decayed[t,:] S[:,v]        u = INV ((V - u1) * b)
    o = q_decayed S + Mqk u                S' = bf(g_total * S + k_restored^T u)

`EightColumns` gives the state to the products as their B operand and transposes every result (MOVM) before it is one;
`SixteenColumns` exchanges the operands: the state is the A operand, and every product comes out as the next one's. A
warp of eight columns issues 220 instructions a chunk, one of sixteen 330, and both read all of the record from shared
memory: eight columns are for where a head has SMs enough.

The loop is rotated: updating block m of the state and feeding it to the next chunk's u1 are one step. Everything here
is traced: every loop is unrolled. Where the order of instructions matters, layout.Schedule decides it.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from . import ptx
from .record import BETA, G_TOTAL, INV, K_BLOCKS, K_DECAYED, K_RESTORED, MQK, Q_DECAYED, RECORD_BYTES, TRIANGLE_PAIR


def _get(tensor, first, count):
    return [tensor[first + i] for i in range(count)]


def _put(tensor, first, values):
    for i, value in enumerate(values):
        tensor[first + i] = value


class _Loads:
    """The loads of blocks 0 ... 7 in order, each issued `lead` blocks before it is taken."""

    def __init__(self, lead, load):
        self.lead, self.load, self.loaded = lead, load, []
        self.take(-1)

    def take(self, m):
        while len(self.loaded) < min(m + 1 + self.lead, K_BLOCKS):
            self.loaded.append(self.load(len(self.loaded)))
        return self.loaded[m] if m >= 0 else None


class _Columns:
    """One chunk's work, and the registers that outlive it. A subclass is the form of the products.

    Of each block of `WIDTH` columns a lane has WIDTH / 8 C fragments of every product, WIDTH / 4 words of V and
    WIDTH / 4 words of the state for each of the 8 blocks of key channels.
    """

    WIDTH = BETAS = 0  # BETAS: words of beta a lane has

    def __init__(self, layout, warp, lane, state):
        self.blocks, self.schedule = range(layout.blocks), layout.schedule
        self.a, self.t, self.lane16 = lane // 4, lane % 4, lane * 16
        self.words = self.WIDTH // 4
        self.value_address = self.address_of_values(layout, warp, lane)
        self.state = state  # words of block m of columns b: K_BLOCKS * words * b + words * m + ...
        # what the coming chunk already has
        self.u1 = cute.make_rmem_tensor(self.WIDTH // 2 * layout.blocks, Float32)  # its first product, C fragments
        self.o = cute.make_rmem_tensor(self.WIDTH // 2 * layout.blocks, Float32)  # q_decayed S, blocks < schedule.early
        self.q = cute.make_rmem_tensor(4 * (K_BLOCKS - self.schedule.early), Int32)  # q_decayed of the other blocks
        self.small = cute.make_rmem_tensor(6 + self.BETAS + self.words * layout.blocks, Int32)  # INV, Mqk, beta, V

    # --- loads

    def _operand(self, stage, field, m):
        """The record's fragments of block m: of its first 8 rows, two words, and of its other 8."""
        return ptx.load_shared(stage + self.lane16, 4, field + 512 * m)

    def _load_small(self, stage):
        words = []
        for field in (INV, MQK):
            words += ptx.load_shared(stage + self.lane16 // 2, 2, field)
            words.append(ptx.load_shared(stage + self.lane16 // 4, 1, field + TRIANGLE_PAIR))
        words += self.load_beta(stage)
        for b in self.blocks:
            words += self.load_values(stage, b)
        _put(self.small, 0, words)

    def _coming(self, stage):
        """Loads of the coming chunk's k_decayed and q_decayed."""
        return _Loads(
            self.schedule.lead,
            lambda m: (self._operand(stage, K_DECAYED, m), self._operand(stage, Q_DECAYED, m)),
        )

    # --- one chunk

    def _state(self, b, m):
        return _get(self.state, self.words * (K_BLOCKS * b + m), self.words)

    def _fragments(self, tensor, b):
        return [_get(tensor, self.WIDTH // 2 * b + 4 * j, 4) for j in range(self.WIDTH // 8)]

    def _pack(self, c):
        """The C fragments of one product as words of bf16."""
        return [ptx.pack_bf16(x[i], x[i + 1]) for x in c for i in (0, 2)]

    def _advance(self, coming, m, operands, u1, o):
        """Block m of the coming chunk's products with the state, of which it is given as `operands`."""
        k, q = coming.take(m)
        u1 = [self.product(operands[b], k, u1[b]) for b in self.blocks]
        if m < self.schedule.early:
            o = [self.product(operands[b], q, o[b]) for b in self.blocks]
        else:
            _put(self.q, 4 * (m - self.schedule.early), q)
        return u1, o

    def _catch_up(self, m, o):
        """Block m of q_decayed S, left over from the turn before."""
        q = _get(self.q, 4 * (m - self.schedule.early), 4)
        for b in self.blocks:
            o[b] = self.product(self.recall(b, m), q, o[b])

    def _keep(self, u1, o):
        for b in self.blocks:
            _put(self.u1, self.WIDTH // 2 * b, [x for c in u1[b] for x in c])
            _put(self.o, self.WIDTH // 2 * b, [x for c in o[b] for x in c])

    def _no_sums(self):
        return [[None] * (self.WIDTH // 8) for _ in self.blocks]

    def start(self, stage):
        """The first chunk's products."""
        self._load_small(stage)
        coming = self._coming(stage)
        u1 = o = self._no_sums()
        for m in range(K_BLOCKS):
            operands = [self.operand(self._state(b, m)) for b in self.blocks]
            self.remember(m, operands)
            u1, o = self._advance(coming, m, operands, u1, o)
        self._keep(u1, o)

    def step(self, stage, ahead, next_full, next_parity, out_row, out_half, rows=None, keep=None):
        """One chunk: output and state update from `stage`, and the coming chunk's products from `ahead`.

        Stores `rows` rows of output (None: all 16). -> whether the stage after `ahead` is full, which is asked in the
        middle of the work because the answer takes longer than the loop's end can hide. `keep`: called with each block
        of the new state, as operands, beside its update, where the stores of a checkpoint find the memory queue idle.
        """
        schedule = self.schedule
        if schedule.barrier < 0:
            ready = ptx.barrier_try(next_full, next_parity)
        inv, mqk = (self.triangle(*_get(self.small, first, 3)) for first in (0, 3))
        beta = _get(self.small, 6, self.BETAS)
        coming = self._coming(ahead)
        update = _Loads(
            schedule.lead,
            lambda m: (self._operand(stage, K_RESTORED, m), self.load_gate(stage, m)),
        )
        u = []
        for b in self.blocks:
            u1 = self._pack(self._fragments(self.u1, b))
            v = _get(self.small, 6 + self.BETAS + self.words * b, self.words)
            words = zip(v, u1, self.factors(beta), strict=True)
            u.append(self.operand([ptx.mul_bf16(ptx.sub_bf16(x, y), f) for x, y, f in words]))
        u = [self.operand(self._pack(self.product(u[b], inv))) for b in self.blocks]
        # The rest of q_decayed S hides the latency of the three steps above.
        o = [self._fragments(self.o, b) for b in self.blocks]
        for m in range(schedule.early, K_BLOCKS - schedule.defer):
            self._catch_up(m, o)

        next_u1 = next_o = self._no_sums()
        products, operands, kept = [], [], 0
        for m in range(K_BLOCKS + schedule.lag):
            if m < K_BLOCKS:
                if m < schedule.defer:  # from the state that this turn replaces
                    self._catch_up(K_BLOCKS - schedule.defer + m, o)
                while len(products) < min(m + 1 + schedule.ahead, K_BLOCKS):
                    k_restored, g_total = update.take(len(products))
                    products.append((g_total, [self.product(u[b], k_restored) for b in self.blocks]))
                g_total, sums = products[m]
                operands.append([])
                for b in self.blocks:
                    state = self.update(self._state(b, m), g_total, sums[b])
                    _put(self.state, self.words * (K_BLOCKS * b + m), state)
                    operands[m].append(self.operand(state))
                self.remember(m, operands[m])
            done = m - schedule.lag
            if done >= 0:
                next_u1, next_o = self._advance(coming, done, operands[done], next_u1, next_o)
            if keep is not None:
                last = m == K_BLOCKS + schedule.lag - 1
                while kept < (K_BLOCKS if last else min(m + 1 - schedule.checkpoint, K_BLOCKS)):
                    keep(kept, operands[kept])
                    kept += 1
            if m == schedule.barrier:
                ready = ptx.barrier_try(next_full, next_parity)
            if m == schedule.mqk:
                o2 = [self._pack(self.product(u[b], mqk)) for b in self.blocks]
            if m == schedule.small_loads:
                self._load_small(ahead)
            if m == schedule.store:
                for b in self.blocks:
                    words = [ptx.add_bf16(x, y) for x, y in zip(self._pack(o[b]), o2[b], strict=True)]
                    self.store(words, out_row, out_half, b, rows)
        self._keep(next_u1, next_o)
        return ready

    def _store_row(self, word, second_half, out_row, out_half, offset, rows):
        row, address = (self.a + 8, out_row + out_half) if second_half else (self.a, out_row)
        if rows is None:
            ptx.store_global(address, (word,), offset)
        else:
            ptx.store_global_if(rows, row, address, (word,), offset)


class SixteenColumns(_Columns):
    """The state is the A operand (rows: value columns, k: key channels): a product is [v, t] or [v, channel]."""

    WIDTH, BETAS = 16, 2

    @staticmethod
    def address_of_values(layout, warp, lane):
        # of the ldmatrix that transposes V: row and column of this lane's address
        row = (lane & 7) + (lane >> 4) * 8
        column = warp * 32 * layout.blocks + ((lane >> 3) & 1) * 16
        return RECORD_BYTES + row * layout.value_pitch + column

    def load_values(self, stage, b):
        return ptx.load_matrices_transposed(stage + self.value_address, 32 * b)

    def load_beta(self, stage):
        return ptx.load_shared(stage + self.t * 8, 2, BETA)

    def load_gate(self, stage, m):
        """g_total of the lane's four key channels."""
        return ptx.load_shared(stage + self.t * 16, 4, G_TOTAL + 64 * m, ptx.F32)

    @staticmethod
    def triangle(lower, inner, corner):
        return [corner, Int32(0), lower, inner]

    @staticmethod
    def factors(beta):
        """beta for each word of V."""
        return beta[0], beta[0], beta[1], beta[1]

    @staticmethod
    def operand(words):
        return words

    def remember(self, m, operands):
        """The operands are the state itself."""

    def recall(self, b, m):
        return self._state(b, m)

    @staticmethod
    def product(a, words, c=(None, None)):
        return [ptx.mma_bf16(a, words[0], words[1], c[0]), ptx.mma_bf16(a, words[2], words[3], c[1])]

    @staticmethod
    def update(state, gate, acc):
        new = []
        for j in (0, 1):
            for i in (0, 2):
                s = state[2 * j + i // 2]
                lo = ptx.fma_f32(ptx.low_bf16(s), gate[2 * j], acc[j][i])
                hi = ptx.fma_f32(ptx.high_bf16(s), gate[2 * j + 1], acc[j][i + 1])
                new.append(ptx.pack_bf16(lo, hi))
        return new

    def store(self, words, out_row, out_half, b, rows):
        for i, word in enumerate(words):
            self._store_row(ptx.transpose(word), i >= 2, out_row, out_half, 32 * b + 16 * (i % 2), rows)

    # --- the lane's part of a stored state: of row a + 8 * r of block b, key channels 16m + 4t ... + 3 as two words

    @staticmethod
    def put_channels(state, b, r, m, lo, hi):
        state[b * 32 + 4 * m + r] = lo
        state[b * 32 + 4 * m + 2 + r] = hi

    @staticmethod
    def channels(operand, r, zero):
        # Copies. A vector store of the state's own registers would have them paired for it, and moved about at each
        # turn of the loop (40 ... 190 instructions). `zero` is 0, but not to the compiler's knowledge.
        return operand[r] ^ zero, operand[2 + r] ^ zero


class EightColumns(_Columns):
    """The state is the B operand (k: key channels, columns: value columns): a product is [t, v] or [channel, v].

    Lane (a, t) has columns 2t, 2t + 1 of the state, and in word j of block m key channel 16m + 4(a/2) + a%2 + 2j.
    """

    WIDTH, BETAS = 8, 1

    def __init__(self, layout, warp, lane, state):
        super().__init__(layout, warp, lane, state)
        self.late = cute.make_rmem_tensor(2 * (K_BLOCKS - self.schedule.early), Int32)

    @staticmethod
    def address_of_values(layout, warp, lane):
        return RECORD_BYTES + (lane & 15) * layout.value_pitch + warp * 16

    def load_values(self, stage, b):
        return ptx.load_matrices(stage + self.value_address)

    def load_beta(self, stage):
        return [ptx.load_shared(stage + 4 * self.a, 1, BETA)]

    def load_gate(self, stage, m):
        """g_total of the lane's two key channels."""
        if m % 2 == 0:
            self.gates = ptx.load_shared(stage + 16 * self.a, 4, G_TOTAL + 64 * m, ptx.F32)
            return self.gates[:2]
        return self.gates[2:]

    @staticmethod
    def triangle(corner, lower, inner):
        return [corner, lower, Int32(0), inner]

    @staticmethod
    def factors(beta):
        return ptx.twice_low(beta[0]), ptx.twice_high(beta[0])

    @staticmethod
    def operand(words):
        return [ptx.transpose(word) for word in words]

    def remember(self, m, operands):
        if m >= self.schedule.early:
            _put(self.late, 2 * (m - self.schedule.early), operands[0])

    def recall(self, b, m):
        return _get(self.late, 2 * (m - self.schedule.early), 2)

    @staticmethod
    def product(b, words, c=(None,)):
        return [ptx.mma_bf16(words, b[0], b[1], c[0])]

    @staticmethod
    def update(state, gate, acc):
        new = []
        for j in (0, 1):
            lo = ptx.fma_f32(ptx.low_bf16(state[j]), gate[j], acc[0][2 * j])
            hi = ptx.fma_f32(ptx.high_bf16(state[j]), gate[j], acc[0][2 * j + 1])
            new.append(ptx.pack_bf16(lo, hi))
        return new

    def store(self, words, out_row, out_half, b, rows):
        for i, word in enumerate(words):
            self._store_row(word, i == 1, out_row, out_half, 0, rows)

    # --- the lane's part of a stored state: of row a, key channels 16m + 4t ... + 3 as two words

    @staticmethod
    def put_channels(state, b, r, m, lo, hi):
        state[2 * m], state[2 * m + 1] = ptx.transpose(lo), ptx.transpose(hi)

    @staticmethod
    def channels(operand, r, zero):
        return operand
