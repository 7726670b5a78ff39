"""Not PTX."""

import cutlass.cute as cute
from cutlass import Int64


@cute.kernel
def refused(source: Int64):
    cute.arch.inline_ptx("no.such.instruction {$r0};", read_only_args=[source])


@cute.jit
def host(source: Int64):
    refused(source).launch(grid=(1, 1, 1), block=(128, 1, 1))


def trace(spec):
    return host, (Int64(0),)
