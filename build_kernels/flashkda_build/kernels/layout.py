"""Sizes of the two kernels that the launcher must know too. Importable without the DSL."""

from .record import CHUNK, HEAD_DIM, RECORD_BYTES

# --- prepare: one warp a (tile, head)
PREPARE_WARPS = 2  # consecutive tiles of one head; more would end later together
EXCHANGE_BYTES = (
    CHUNK * 512
)  # a warp: 16 rows x 32 slots of {bf16 2^G x4, bf16 2^-G x4}; before that, one normalised tensor
GATE_BYTES = CHUNK * 256  # a warp: 16 rows of g
PREPARE_SHARED_MEMORY = PREPARE_WARPS * (EXCHANGE_BYTES + GATE_BYTES)
PREPARE_CTAS_PER_SM = 8

# --- recurrence: a ring of stages, each a record and a tile of V
STAGES = 6
BARRIER_BYTES = 128  # full[STAGES], empty[STAGES]


class RecurrenceLayout:
    """Sizes that follow from BV."""

    def __init__(self, bv: int) -> None:
        self.bv = bv
        self.slices = HEAD_DIM // bv  # CTAs a head
        self.warps = min(4, bv // 16)  # compute warps, one a scheduler
        self.blocks = bv // 16 // self.warps  # blocks of 16 value columns a warp
        self.threads = 32 * self.warps + 32
        self.value_pitch = (
            2 * bv + 16
        )  # bytes a row of V in shared memory; the padding keeps ldmatrix free of conflicts
        self.stage = (RECORD_BYTES + CHUNK * self.value_pitch + 127) // 128 * 128
        self.shared_memory = BARRIER_BYTES + STAGES * self.stage
        self.ctas_per_sm = 1 if bv == HEAD_DIM else 2
        # the launch bound (CTAs an SM) and the distance of operand loads (blocks) that give ptxas's best schedule
        self.launch_bound, self.lead = (3, 1) if bv == 64 else (1, 2)
