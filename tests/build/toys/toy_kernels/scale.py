"""target[i * stride] = source[i * stride] * factor, flushed, through shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.kernel
def scale(source: Int64, target: Int64, stride: Int64, count: Int32, factor: Float32):
    i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if i < count:
        shared = cute.arch.get_dyn_smem(cutlass.Int8, 16).toint() + 4 * cute.arch.thread_idx()[0]
        cute.arch.inline_ptx(
            "{ .reg .f32 x; ld.global.f32 x, [{$r0}]; st.shared.f32 [{$r3}], x; mul.rn.ftz.f32 x, x, {$r2};"
            " st.global.f32 [{$r1}], x; }",
            read_only_args=[source + 4 * stride * i, target + 4 * stride * i, factor, shared],
        )


@cute.jit
def host(source: Int64, target: Int64, stride: Int64, count: Int32, factor: Float32):
    scale(source, target, stride, count, factor).launch(grid=(1, 1, 1), block=(128, 1, 1), smem=4096)


def trace(spec):
    return host, (Int64(0), Int64(0), Int64(1), Int32(1), Float32(1.0))
