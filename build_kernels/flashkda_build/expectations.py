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


def _recurrence(blocks: int) -> Expectation:
    """The recurrence whose compute warps own `blocks` blocks of 16 value columns each.

    Each product of a block is two 8-column HMMA. Before the loop: u1 of the first chunk (8 k blocks). In it: u, o1
    (8), Mqk u, the update (8 blocks of key channels) and the next chunk's u1 (8). The compiler sets the last chunk's
    turn apart, where there is no next chunk: all but u1 is in the code twice.
    """
    turns = 2
    return Expectation(
        counts={
            "HMMA.16816.F32.BF16": blocks * 2 * (8 + 8 + turns * (1 + 8 + 1 + 8)),
            "HMMA.16816.F16": 0,
            "MUFU.EX2": 0,
            "MUFU.TANH": 0,
            "MUFU.RSQ": 0,
            "MOVM": turns * blocks * 4,  # the output tile
            "fp32 add": 0,
            "fp32 mul": 0,
            "fp32 fma": turns * blocks * 8 * 8,  # the state update, 8 a lane and block of key channels
            "bf16 add": turns * blocks * (4 + 4),  # v - u1, o1 + o2
            "bf16 mul": turns * blocks * 4,  # times beta
            "fp16 add": 0,
            "fp16 mul": 0,
        }
    )


#: (kernel, bv) -> what its machine code contains
EXPECTATIONS: Mapping[tuple[str, int | None], Expectation] = {
    # One warp makes one record: 16 rows, each lane 4 channels of the gate, 2 rows x 4 channels of each block of 16.
    ("prepare", None): Expectation(
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
    ),
    ("recurrence", 32): _recurrence(blocks=1),
    ("recurrence", 64): _recurrence(blocks=1),
    ("recurrence", 128): _recurrence(blocks=2),
}
