"""One kernel body a variant, named by `numerics`; most of them break a rule of the audit."""

from flashkda_build.spec import KernelSpec

#: name -> PTX on registers x, y, z (32 bits each); the result is x
BODIES = {
    "clean": "add.rn.ftz.f32 x, x, y; mul.rn.bf16x2 x, x, z; add.rn.bf16x2 x, x, y; sub.rn.bf16x2 x, x, z;"
    " mul.rn.f16x2 x, x, z; add.rn.f16x2 x, x, y; ex2.approx.ftz.f32 x, x;",
    "unflushed": "add.rn.f32 x, x, y;",
    "contracted": "mul.bf16x2 x, x, y; add.bf16x2 x, x, z;",
    "explicit_fma": "fma.rn.bf16x2 x, x, y, z;",
    "fp16_fma": "fma.rn.f16x2 x, x, y, z;",
    "flushed_fp16": "mul.rn.ftz.f16x2 x, x, y;",
    "toward_zero": "add.rz.ftz.f32 x, x, y;",
    "short_product": ".reg .f32 d<4>; mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {d0,d1,d2,d3}, {x,y}, {z},"
    " {0f00000000,0f00000000,0f00000000,0f00000000}; mov.b32 x, d0;",
    "local": ".local .align 4 .b8 space[64]; .reg .b32 s; mov.u32 s, space; and.b32 z, z, 60; add.u32 s, s, z;"
    " st.local.b32 [s], x; st.local.b32 [space], y; ld.local.b32 x, [s];",
}
KERNELS = tuple(
    KernelSpec(
        kernel="recurrence",
        bv=None,
        numerics=name,
        record_order="a",
        threads=128,
        units_per_cta=1,
        dynamic_shared_memory=0,
        min_ctas_per_sm=1,
        parameters=(("source", "pointer"), ("target", "pointer")),
        module="toy_offenders.body",
    )
    for name in BODIES
)
