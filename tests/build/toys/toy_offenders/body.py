"""Three words in, the variant's PTX, one word out."""

import cutlass.cute as cute
from cutlass import Int64

from toy_offenders import BODIES


def trace(spec):
    @cute.kernel
    def body(source: Int64, target: Int64):
        cute.arch.inline_ptx(
            "{ .reg .b32 x, y, z; ld.global.b32 x, [{$r0}]; ld.global.b32 y, [{$r0}+4]; ld.global.b32 z, [{$r0}+8]; "
            + BODIES[spec.numerics]
            + " st.global.b32 [{$r1}], x; }",
            read_only_args=[source, target],
        )

    @cute.jit
    def host(source: Int64, target: Int64):
        body(source, target).launch(grid=(1, 1, 1), block=(128, 1, 1))

    return host, (Int64(0), Int64(0))
