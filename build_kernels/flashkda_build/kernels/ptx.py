"""The PTX instructions the kernels are made of, one function each.

Every rounding of the numeric contract is spelled out here as an instruction of its own: the DSL's operators would let
ptxas contract a multiply and an add, and would not flush denormals. bf16x2 and fp16x2 values are plain 32-bit words.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

I32, I64, F32 = "i32", "i64", "f32"
_CONSTRAINT = {I32: "r", I64: "l", F32: "f"}
_WRAP = {I32: Int32, I64: Int64, F32: Float32}


def _mlir_type(kind):
    return ir.F32Type.get() if kind == F32 else ir.IntegerType.get_signless(32 if kind == I32 else 64)


def _operand(x):
    """-> (constraint, SSA value) of a DSL scalar."""
    kind = F32 if isinstance(x, Float32) else I64 if isinstance(x, Int64) else I32
    return _CONSTRAINT[kind], (x if isinstance(x, (Int32, Int64, Float32)) else Int32(x)).ir_value()


def _kind(x):
    return F32 if isinstance(x, Float32) else I32


def asm(text, outs, ins, effects=False):
    """Inline PTX with operands $0 ... : first the results (`outs`: a tuple of kinds), then `ins`.

    `effects` keeps an instruction that touches memory or barriers where it stands relative to the others of its sort.
    """
    operands = [_operand(x) for x in ins]
    constraints = ",".join(
        ["=" + _CONSTRAINT[k] for k in outs] + [c for c, _ in operands] + (["~{memory}"] if effects else [])
    )
    if len(outs) > 1:
        result_type = llvm.StructType.get_literal([_mlir_type(k) for k in outs])
    else:
        result_type = _mlir_type(outs[0]) if outs else None
    result = llvm.inline_asm(
        result_type,
        [v for _, v in operands],
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=0,
    )
    if not outs:
        return None
    if len(outs) == 1:
        return _WRAP[outs[0]](result)
    return [_WRAP[k](llvm.extractvalue(_mlir_type(k), result, [i])) for i, k in enumerate(outs)]


# --- fp32, round to nearest even, denormals flushed


def add_f32(a, b):
    return asm("add.rn.ftz.f32 $0, $1, $2;", (F32,), (a, b))


def mul_f32(a, b):
    return asm("mul.rn.ftz.f32 $0, $1, $2;", (F32,), (a, b))


def fma_f32(a, b, c):
    return asm("fma.rn.ftz.f32 $0, $1, $2, $3;", (F32,), (a, b, c))


def ex2_f32(a):
    return asm("ex2.approx.ftz.f32 $0, $1;", (F32,), (a,))


def ex2_neg_f32(a):
    return asm("{ .reg .f32 n; neg.ftz.f32 n, $1; ex2.approx.ftz.f32 $0, n; }", (F32,), (a,))


def tanh_f32(a):
    return asm("tanh.approx.f32 $0, $1;", (F32,), (a,))


def rsqrt_f32(a):
    return asm("rsqrt.approx.ftz.f32 $0, $1;", (F32,), (a,))


def sigmoid_f32(x, factor=None):
    """FMA(tanh(x / 2), 1/2, 1/2); of factor * x if a factor is given.

    Halving is exact, and where it is not .rn ptxas lets the multiply before it do it (FMUL.D2). No add follows that it
    could contract with.
    """
    half = Float32(0.5)
    if factor is not None:
        x = asm("mul.ftz.f32 $0, $1, $2;", (F32,), (factor, x))
    return fma_f32(tanh_f32(asm("mul.ftz.f32 $0, $1, 0f3F000000;", (F32,), (x,))), half, half)


# --- bf16x2 and fp16x2, one rounding each, denormals kept


def pack_bf16(lo, hi):
    return asm("cvt.rn.bf16x2.f32 $0, $1, $2;", (I32,), (hi, lo))


def pack_f16(lo, hi):
    return asm("cvt.rn.f16x2.f32 $0, $1, $2;", (I32,), (hi, lo))


def low_bf16(x):
    """fp32 of the low bf16 half."""
    return asm("{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", (F32,), (x,))


def high_bf16(x):
    """fp32 of the high bf16 half."""
    return asm("{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", (F32,), (x,))


def twice_low(x):
    """The low half of a word in both halves."""
    return asm("prmt.b32 $0, $1, $1, 0x1010;", (I32,), (x,))


def twice_high(x):
    """The high half of a word in both halves."""
    return asm("prmt.b32 $0, $1, $1, 0x3232;", (I32,), (x,))


def mul_f16(a, b):
    return asm("mul.rn.f16x2 $0, $1, $2;", (I32,), (a, b))


def add_f16(a, b):
    return asm("add.rn.f16x2 $0, $1, $2;", (I32,), (a, b))


def f16_to_bf16(x):
    """Each half of a word from fp16 to bf16 (through fp32, one rounding)."""
    text = """{
        .reg .b16 l, h;
        .reg .f32 fl, fh;
        mov.b32 {l, h}, $1;
        cvt.f32.f16 fl, l;
        cvt.f32.f16 fh, h;
        cvt.rn.bf16x2.f32 $0, fh, fl;
        }"""
    return asm(text, (I32,), (x,))


def mul_bf16(a, b):
    return asm("mul.rn.bf16x2 $0, $1, $2;", (I32,), (a, b))


def add_bf16(a, b):
    return asm("add.rn.bf16x2 $0, $1, $2;", (I32,), (a, b))


def sub_bf16(a, b):
    return asm("sub.rn.bf16x2 $0, $1, $2;", (I32,), (a, b))


# --- tensor core and transposition


def mma_bf16(a, b0, b1, c=None):
    """D[16x8] = A[16x16] B[16x8] + C, bf16 products, fp32 sum. `a`: 4 words, `c`: 4 fp32 (None: +0)."""
    outs = (F32,) * 4
    head = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, "
    if c is None:
        return asm(head + "{$10,$10,$10,$10};", outs, (*a, b0, b1, Float32(0.0)))
    return asm(head + "{$10,$11,$12,$13};", outs, (*a, b0, b1, *c))


def mma_f16(a, b0, b1):
    """D[16x8] = A[16x16] B[16x8], fp16 products AND fp16 accumulator, from +0. -> 2 words."""
    text = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {$0,$1}, {$2,$3,$4,$5}, {$6,$7}, {$8,$8};"
    return asm(text, (I32,) * 2, (*a, b0, b1, Int32(0)))


def shuffle_xor(x, mask):
    return asm("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", (_kind(x),), (x, Int32(mask)), effects=True)


def shuffle(x, lane):
    return asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", (_kind(x),), (x, lane), effects=True)


def count_votes(limit, value):
    """How many lanes of the warp have value <= limit."""
    text = """{
        .reg .pred p;
        .reg .b32 b;
        setp.le.s32 p, $1, $2;
        vote.sync.ballot.b32 b, p, -1;
        popc.b32 $0, b;
        }"""
    return asm(text, (I32,), (value, limit), effects=True)


def lane_where_equal(value, wanted):
    """The first lane of the warp whose value is `wanted`."""
    text = """{
        .reg .pred p;
        .reg .b32 lanes;
        setp.eq.s32 p, $1, $2;
        vote.sync.ballot.b32 lanes, p, -1;
        brev.b32 lanes, lanes;
        clz.b32 $0, lanes;
        }"""
    return asm(text, (I32,), (value, wanted), effects=True)


def less(a, b):
    """1 where a < b, else 0."""
    return asm("{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.s32 $0, 1, 0, p; }", (I32,), (a, b))


def select_i64(condition, a, b):
    """a where condition (an int) is not 0, else b, without a branch."""
    return asm("{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b64 $0, $2, $3, p; }", (I64,), (condition, a, b))


def select_less(row, limit, value):
    """value (fp32) where row < limit, else +0."""
    return asm(
        "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.f32 $0, $3, 0f00000000, p; }", (F32,), (Int32(row), limit, value)
    )


def half_mask(low, high, relation):
    """0xffff in the low half where `low` (lt, eq) 0, and in the high half where `high` is."""
    text = f"""{{
        .reg .pred p, q;
        .reg .b32 l, h;
        setp.{relation}.s32 p, $1, 0;
        setp.{relation}.s32 q, $2, 0;
        selp.b32 l, 0x0000ffff, 0, p;
        selp.b32 h, 0xffff0000, 0, q;
        or.b32 $0, l, h;
        }}"""
    return asm(text, (I32,), (low, high))


def transpose(x):
    """Transpose an 8x8 matrix of 16-bit elements held one row pair a lane."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", (I32,), (x,))


# --- memory. Addresses are byte addresses: 64 bit in global memory, 32 bit in shared memory


def load_global(address, words, kind=I32, offset=0):
    """One load of `words` consecutive 32-bit words (1, 2 or 4)."""
    return _load("ld.global", address, words, kind, offset)


def load_shared(address, words, offset=0, kind=I32):
    return _load("ld.shared", address, words, kind, offset)


def _load(op, address, words, kind, offset):
    suffix = {1: "", 2: ".v2", 4: ".v4"}[words] + (".f32" if kind == F32 else ".b32")
    results = "$0" if words == 1 else "{" + ",".join(f"${i}" for i in range(words)) + "}"
    return asm(f"{op}{suffix} {results}, [${words}+{offset}];", (kind,) * words, (address,), effects=True)


def load_global_if(limit, row, address, words):
    """`words` (2 or 4) words where row < limit, else zeros and no access. Kept out of L1: for what is read once."""
    results = ",".join(f"${i}" for i in range(words))
    zeros = "".join(f"mov.b32 ${i}, 0;" for i in range(words))
    text = f"""{{
        .reg .pred p;
        setp.gt.s32 p, ${words}, ${words + 1};
        {zeros}
        @p ld.global.nc.L1::no_allocate.v{words}.b32 {{{results}}}, [${words + 2}];
        }}"""
    return asm(text, (I32,) * words, (limit, row, address), effects=True)


def load_global_bf16_if(limit, row, address):
    """A bf16 as fp32 where row < limit, else 0 and no access."""
    text = """{
        .reg .pred p;
        .reg .b16 zero, value;
        setp.gt.s32 p, $1, $2;
        mov.b16 zero, 0;
        mov.b16 value, 0;
        @p ld.global.nc.b16 value, [$3];
        mov.b32 $0, {zero, value};
        }"""
    return asm(text, (F32,), (limit, row, address), effects=True)


def store_global_low_half(address, word):
    asm("{ .reg .b16 h, n; mov.b32 {h, n}, $1; st.global.b16 [$0], h; }", (), (address, word), effects=True)


def store_global(address, values, offset=0):
    """One store of 1, 2 or 4 consecutive 32-bit words."""
    _store("st.global", address, values, offset)


def store_shared(address, values, offset=0):
    _store("st.shared", address, values, offset)


def _store(op, address, values, offset):
    suffix = {1: "", 2: ".v2", 4: ".v4"}[len(values)] + (".f32" if isinstance(values[0], Float32) else ".b32")
    operands = "$1" if len(values) == 1 else "{" + ",".join(f"${i + 1}" for i in range(len(values))) + "}"
    asm(f"{op}{suffix} [$0+{offset}], {operands};", (), (address, *values), effects=True)


def store_global_if(limit, row, address, values, offset=0):
    """store_global where row < limit."""
    n = len(values)
    operands = "$3" if n == 1 else "{" + ",".join(f"${i + 3}" for i in range(n)) + "}"
    suffix = {1: "", 2: ".v2", 4: ".v4"}[n]
    text = f"{{ .reg .pred p; setp.gt.s32 p, $0, $1; @p st.global{suffix}.b32 [$2+{offset}], {operands}; }}"
    asm(text, (), (limit, row, address, *values), effects=True)


def load_matrices_transposed(address, offset=0):
    """ldmatrix.x4.trans: four 8x8 matrices of 16-bit elements, lane i gives the address of row i."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
    return asm(text, (I32,) * 4, (address,), effects=True)


def load_matrices(address, offset=0):
    """ldmatrix.x2: two 8x8 matrices of 16-bit elements, lane i < 16 gives the address of row i."""
    text = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0,$1}}, [$2+{offset}];"
    return asm(text, (I32,) * 2, (address,), effects=True)


def copy_async_16(shared_address, global_address, source_bytes, offset=0):
    """16 bytes to shared memory, of which `source_bytes` (0 or 16) are read and the rest are zero."""
    asm(
        f"cp.async.cg.shared.global [$0+{offset}], [$1], 16, $2;",
        (),
        (shared_address, global_address, source_bytes),
        effects=True,
    )


def copy_async_commit():
    """Close a group of this thread's copy_async_16."""
    asm("cp.async.commit_group;", (), (), effects=True)


def copy_async_wait(pending=None):
    """Wait for all of this thread's copy_async_16, or for all groups but the last `pending`."""
    asm("cp.async.wait_all;" if pending is None else f"cp.async.wait_group {pending};", (), (), effects=True)


def copy_bulk(shared_address, global_address, size, barrier):
    """1-D bulk copy; completes `size` bytes on `barrier`."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(text, (), (shared_address, global_address, size, barrier), effects=True)


# --- barriers


def barrier_init(barrier, count):
    asm("mbarrier.init.shared.b64 [$0], $1;", (), (barrier, count), effects=True)


def barrier_init_fence():
    asm("fence.mbarrier_init.release.cluster;", (), (), effects=True)


def barrier_arrive(barrier):
    asm("mbarrier.arrive.shared.b64 _, [$0];", (), (barrier,), effects=True)


def barrier_arrive_expect(barrier, size):
    asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", (), (barrier, size), effects=True)


def opaque(x):
    """x, in a form the compiler can neither recompute nor move out of a register."""
    return asm("mov.b32 $0, $1;", (I32,), (x,), effects=True)


def barrier_try(barrier, parity):
    """-> 1 if the phase of that parity has completed, 0 if not yet."""
    text = "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    return asm(text, (I32,), (barrier, parity), effects=True)


def barrier_wait(barrier, parity):
    text = "{ .reg .pred p; L_wait_${:uid}: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @!p bra L_wait_${:uid}; }"
    asm(text, (), (barrier, parity), effects=True)


# --- integers


def min_i64(a, b):
    return asm("min.s64 $0, $1, $2;", (I64,), (a, b))


def max_i64(a, b):
    return asm("max.s64 $0, $1, $2;", (I64,), (a, b))


def load_index(array, index, is_int64):
    """array[index] of an int32 or (is_int64 != 0) int64 array, as 64 bit; 0 without a load if array is null."""
    text = """{
        .reg .pred present, wide, narrow;
        .reg .b64 a4, a8;
        .reg .b32 word;
        setp.ne.s64 present, $1, 0;
        setp.ne.and.s32 wide, $3, 0, present;
        setp.eq.and.s32 narrow, $3, 0, present;
        mad.wide.s32 a4, $2, 4, $1;
        mad.wide.s32 a8, $2, 8, $1;
        mov.b32 word, 0;
        @narrow ld.global.b32 word, [a4];
        cvt.s64.s32 $0, word;
        @wide ld.global.b64 $0, [a8];
        }"""
    return asm(text, (I64,), (array, index, is_int64), effects=True)


def load_flag(array, index):
    """array[index] of bytes; 1 without a load if array is null."""
    text = """{
        .reg .pred present;
        .reg .b64 a;
        setp.ne.s64 present, $1, 0;
        mad.wide.s32 a, $2, 1, $1;
        mov.b32 $0, 1;
        @present ld.global.u8 $0, [a];
        }"""
    return asm(text, (I32,), (array, index), effects=True)


def outside(index, size):
    """1 unless 0 <= index (64 bit) < size (32 bit)."""
    text = """{
        .reg .pred p;
        .reg .b64 limit;
        cvt.s64.s32 limit, $2;
        setp.ge.u64 p, $1, limit;
        selp.s32 $0, 1, 0, p;
        }"""
    return asm(text, (I32,), (index, size))


# --- registers of a warpgroup (four warps)


def more_registers(count):
    """Wait for `count` registers a thread, which other warpgroups of the CTA must give up."""
    asm(f"setmaxnreg.inc.sync.aligned.u32 {count};", (), (), effects=True)


def fewer_registers(count):
    """Keep `count` registers a thread."""
    asm(f"setmaxnreg.dec.sync.aligned.u32 {count};", (), (), effects=True)
