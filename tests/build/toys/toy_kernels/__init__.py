"""Two small kernels with every parameter type, standing in for the real ones."""

from flashkda_build.spec import KernelSpec

PARAMETERS = (("source", "pointer"), ("target", "pointer"), ("stride", "i64"), ("count", "i32"), ("factor", "f32"))
KERNELS = tuple(
    KernelSpec(
        kernel=kernel,
        bv=bv,
        numerics="flashkda",
        record_order="a",
        threads=128,
        units_per_cta=1,
        dynamic_shared_memory=4096,
        min_ctas_per_sm=4,
        parameters=PARAMETERS,
        module="toy_kernels.scale",
    )
    for kernel, bv in (("prepare", None), ("recurrence", 32))
)
