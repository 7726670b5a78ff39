"""The design table: what the machine code of each kernel is meant to contain. The audit compares against it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Expectation:
    """counts: audited count (a name of sass.AUDITED) -> exact number on every architecture.
    per_arch: architecture -> numbers that differ there; a comment beside the entry gives the reason.
    unflushed: how many fp32 operations may lack .FTZ; each must be unable to see a denormal, for a reason in a comment.
    A count that is in neither table only has to be the same on every architecture.
    """

    counts: Mapping[str, int]
    per_arch: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unflushed: int = 0

    def on(self, arch: str) -> dict[str, int]:
        """The exact numbers wanted on one architecture."""
        return {"other matrix": 0, "local memory": 0, **self.counts, **self.per_arch.get(arch, {})}


# The chunk loop's body is in the code six times: storing a bf16 or an fp32 checkpoint, for the chunks before each of
# these, for those after them (without checkpoints, all), and for a last one of less than 16 tokens, which has no next.
_TURNS = 6


def _recurrence(columns: int, turned: int) -> Expectation:
    """The recurrence whose compute warps own `columns` value columns each. turned: its MOVM.

    Each product of 8 of them is one HMMA. Before the loop: u1 of the first chunk (8 k blocks). In it: u, o1 (8), Mqk u,
    the update (8 blocks of key channels) and the next chunk's u1 (8), which the last chunk lacks.
    """
    eights = columns // 8
    return Expectation(
        counts={
            "HMMA.16816.F32.BF16": eights * (8 + _TURNS * (1 + 8 + 1 + 8) + (_TURNS - 1) * 8),
            "HMMA.16816.F16": 0,
            "MUFU.EX2": 0,
            "MUFU.TANH": 0,
            "MUFU.RSQ": 0,
            "MOVM": turned,
            "fp32 add": 0,
            "fp32 mul": 0,
            "fp32 fma": _TURNS * eights * 8 * 4,  # the state update, 4 a lane and block of key channels
            "bf16 add": _TURNS * eights * (2 + 2),  # v - u1, o1 + o2
            "bf16 mul": _TURNS * eights * 2,  # times beta
            "fp16 add": 0,
            "fp16 mul": 0,
        }
    )


# 16 columns at once: of each 16 the output tile, 4 words a lane.
_TURNED_16 = _TURNS * 4
# 8 columns at once: (V - u1) * b and u, 2 words each; the state, 16 words, for the first chunk's products (and the
# first checkpoint), in the loop for the next one's, where it is read (2 dtypes) and for the final state.
_TURNED_8 = 16 + _TURNS * (2 + 2) + (_TURNS - 1) * 16 + 16 * (2 + 1)

# One warp makes one record: 16 rows, each lane 4 channels of the gate, 2 rows x 4 channels of each block of 16. The two
# orders differ in where the words go.
_PREPARE = Expectation(
    counts={
        "HMMA.16816.F32.BF16": 2 * 2 * 8,  # L and Mqk: 2 column halves, 8 k blocks
        "HMMA.16816.F16": 3 * 2 * 2,  # the Neumann product: 3 squarings and 3 products
        "MUFU.EX2": 16 * 4 * 2 + 1,  # 2^G and 2^-G, and exp(A_log)
        "MUFU.TANH": 16 * 4 + 1,  # the gates' sigmoid and beta's
        "MUFU.RSQ": 2 * 8,  # q and k: 8 pairs of rows
        "bf16 add": 0,
        "bf16 mul": 8 * 2 * 2 * 5,  # k_decayed, q_decayed (2), ki, k_restored
        # L's upper right 8x8 block is zero: it needs no product, X's first sum there (onto -0) is a copy, and its
        # last, which nobody would read, is left out.
        "fp16 add": 3 * 4 - 2,
        "fp16 mul": 4 - 1,
    }
)

#: (kernel, bv, record order) -> what its machine code contains
EXPECTATIONS: Mapping[tuple[str, int | None, str], Expectation] = {
    ("prepare", None, "a"): _PREPARE,
    ("prepare", None, "b"): _PREPARE,
    ("recurrence", 16, "a"): _recurrence(columns=8, turned=_TURNED_8),
    ("recurrence", 32, "b"): _recurrence(columns=16, turned=_TURNED_16),
    ("recurrence", 64, "b"): _recurrence(columns=16, turned=_TURNED_16),
    ("recurrence", 128, "b"): _recurrence(columns=32, turned=2 * _TURNED_16),
}
