"""The table of kernels: one row a compiled variant. Importable without the DSL."""

from ..spec import RECORD_ORDERS, KernelSpec
from .layout import PREPARE_CTAS_PER_SM, PREPARE_SHARED_MEMORY, PREPARE_WARPS, SCHEDULES, RecurrenceLayout

_PREPARE = (
    *((name, "pointer") for name in ("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "workspace")),
    *((f"{name}_stride_{axis}", "i64") for name in ("q", "k", "g", "beta") for axis in "bth"),
    *((name, "i32") for name in ("seqlen", "num_seqs", "num_heads", "total_tiles", "cu_seqlens_is_int64")),
    *((name, "f32") for name in ("scale", "gate_scale")),
)
_RECURRENCE = (
    *((name, "pointer") for name in ("v", "out", "workspace", "initial_state", "final_state", "cu_seqlens")),
    *((name, "pointer") for name in ("state_indices", "has_initial_state", "checkpoints", "checkpoint_cu_starts")),
    *((f"{name}_stride_{axis}", "i64") for name in ("v", "out") for axis in "bth"),
    *((f"{name}_stride_n", "i64") for name in ("initial", "final", "checkpoint")),
    *((name, "i32") for name in ("seqlen", "num_seqs", "num_heads", "total_tiles", "cu_seqlens_is_int64")),
    *((name, "i32") for name in ("initial_dtype", "final_dtype", "state_indices_is_int64", "num_slots")),
    *((name, "i32") for name in ("checkpoint_dtype", "num_checkpoints", "checkpoint_chunks")),
    ("checkpoint_starts_is_int64", "i32"),
)

# ptxas's -O3 schedule of the recurrence's chunk loop is slower by a fifth, prepare's by a twentieth (DESIGN.md, 5)
_O2 = ("--ptxas-options", "-O2")


def _recurrence(bv: int) -> KernelSpec:
    layout = RecurrenceLayout(bv)
    return KernelSpec(
        kernel="recurrence",
        bv=bv,
        numerics="flashkda",
        record_order=layout.record_order,
        threads=layout.threads,
        units_per_cta=1,
        dynamic_shared_memory=layout.shared_memory,
        min_ctas_per_sm=layout.ctas_per_sm,
        parameters=_RECURRENCE,
        module="flashkda_build.kernels.recurrence",
        options={"*": _O2},
    )


def _prepare(record_order: str) -> KernelSpec:
    return KernelSpec(
        kernel="prepare",
        bv=None,
        numerics="flashkda",
        record_order=record_order,
        threads=32 * PREPARE_WARPS,
        units_per_cta=PREPARE_WARPS,
        dynamic_shared_memory=PREPARE_SHARED_MEMORY,
        min_ctas_per_sm=PREPARE_CTAS_PER_SM,
        parameters=_PREPARE,
        module="flashkda_build.kernels.prepare",
        options={"sm_90a": _O2},  # on the others it spills a register
    )


KERNELS = (*(_prepare(order) for order in RECORD_ORDERS), *(_recurrence(bv) for bv in SCHEDULES))
