"""Sizes of the two kernels that the launcher must know too. Importable without the DSL."""

from dataclasses import dataclass

from .record import CHUNK, HEAD_DIM, RECORD_BYTES

# --- prepare: one warp a (tile, head)
PREPARE_WARPS = 2  # consecutive tiles of one head; more would end later together
# A warp: 16 rows x 32 slots of {bf16 2^G x4, bf16 2^-G x4}. Before that, a normalised tensor in its first half and the
# rows of g in its second.
EXCHANGE_BYTES = CHUNK * 512
PREPARE_SHARED_MEMORY = PREPARE_WARPS * EXCHANGE_BYTES
PREPARE_CTAS_PER_SM = 8

# --- recurrence: a ring of stages, each a record and a tile of V
BARRIER_BYTES = 128  # full[stages], empty[stages]


@dataclass(frozen=True)
class Schedule:
    """What steers the order of the recurrence's instructions; results do not depend on it.

    early: blocks of S q_decayed done as soon as their state is new; the others fill latencies of the next step, the
    last `defer` of them beside its first updates. lead: blocks that an operand's load is ahead of its use; ahead: the
    same of the product that an update adds; lag: blocks that the coming chunk's products are behind the updates. mqk,
    small_loads, barrier, store: the block of the update loop beside which that work off the chain stands (barrier -1:
    before all of it). checkpoint: blocks that the stores of a checkpoint are behind the updates. launch_bound: CTAs an
    SM, as ptxas is told.
    """

    early: int
    defer: int
    lead: int
    ahead: int
    lag: int
    mqk: int
    small_loads: int
    barrier: int
    store: int
    checkpoint: int
    launch_bound: int


# fmt: off
#: By BV, the fastest on an H200 of 40 to 75 tried, at BV 16 of 300 with and without checkpoints: ptxas's choice of
#: registers moves a chunk by 15 % either way.
SCHEDULES = {
    16: Schedule(
        early=4, defer=2, lead=3, ahead=7, lag=2, mqk=1, small_loads=5, barrier=1, store=4,
        checkpoint=5, launch_bound=1,
    ),
    32: Schedule(
        early=5, defer=2, lead=4, ahead=1, lag=2, mqk=2, small_loads=4, barrier=2, store=3,
        checkpoint=2, launch_bound=1,
    ),
    64: Schedule(
        early=4, defer=2, lead=5, ahead=1, lag=1, mqk=0, small_loads=5, barrier=-1, store=5,
        checkpoint=3, launch_bound=1,
    ),
    128: Schedule(
        early=4, defer=0, lead=5, ahead=7, lag=1, mqk=2, small_loads=5, barrier=1, store=7,
        checkpoint=2, launch_bound=2,
    ),
}
# fmt: on


class RecurrenceLayout:
    """Sizes that follow from BV."""

    def __init__(self, bv: int) -> None:
        self.bv = bv
        self.slices = HEAD_DIM // bv  # CTAs a head
        self.columns = 8 if bv == 16 else 16  # value columns of a product (columns.py)
        self.record_order = "a" if self.columns == 8 else "b"
        self.warps = min(4, bv // self.columns)  # compute warps, one a scheduler
        self.blocks = bv // self.columns // self.warps  # products' columns a warp
        # Two blocks a warp need more registers than two CTAs an SM leave a thread. So the loader is a whole warpgroup,
        # three of its warps idle, and hands most of its registers over.
        self.compute_registers, self.loader_registers = (224, 32) if bv == HEAD_DIM else (0, 0)
        self.threads = 32 * self.warps + (128 if bv == HEAD_DIM else 32)
        # bytes a row of V in shared memory; the padding keeps ldmatrix free of conflicts
        self.value_pitch = 2 * bv + 16
        self.stage = (RECORD_BYTES + CHUNK * self.value_pitch + 127) // 128 * 128
        # Six stages cover a record's way from memory. Eight keep a second CTA off the SM: two at once are as slow as
        # one after the other, and a long sequence must not share its SM with a short one that can wait (DESIGN.md, 5).
        self.stages = 6 if bv == HEAD_DIM else 8
        self.shared_memory = BARRIER_BYTES + self.stages * self.stage
        self.ctas_per_sm = 2 if bv == HEAD_DIM else 1
        self.schedule = SCHEDULES[bv]
