"""The shapes that `flashkda bench` runs, and the bytes and cycles they come to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from flashkda.manifest import Contract

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
HEADS = (96, 64, 48, 32, 24, 12, 6)
MIXED = (1300, 547, 2048, 963, 271, 3063)
VARLEN = (MIXED, (1024,) * 8, (512,) * 32, (128,) * 64)
VARLEN_HEADS = (96, 24, 12, 6)
QUICK_TOKENS = (8192,)
QUICK_VARLEN = (MIXED, (1024,) * 8)

#: Tokens between checkpoints where their cost is measured: what prefix caches keep as one block, or a few.
CHECKPOINT_EVERY = 64

#: SM cycles of one chunk's chain of dependent instructions in the recurrence, the sum of their measured latencies on
#: sm_90 with 8 columns a warp (build_kernels/DESIGN.md). No schedule of these instructions is faster.
CHAIN_CYCLES = 358

_BF16 = 2
# Seen on an H200: a shape with all its variants; and what compiles and tunes itself, at each number of heads.
_SHAPE_S = 0.5
_TUNING_S = 60


@dataclass(frozen=True, slots=True)
class Shape:
    """One call's shape: sequence lengths in tokens, and heads. One length is a fixed-length call, more are packed."""

    lengths: tuple[int, ...]
    heads: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def label(self) -> str:
        """The lengths in short: "8192", "8x1024", "1300+547+2048"."""
        if len(set(self.lengths)) == 1 and self.packed:
            return f"{len(self.lengths)}x{self.lengths[0]}"
        return "+".join(map(str, self.lengths))

    def chunks(self, chunk: int) -> int:
        """Chunks of all sequences together, a head."""
        return sum(-(-length // chunk) for length in self.lengths)

    def longest_chain(self, chunk: int) -> int:
        """Chunks of the longest sequence, which run one after another."""
        return -(-max(self.lengths) // chunk)


#: Where the cost of checkpoints is measured: a chain that has its SMs alone, and more CTAs than SMs.
CHECKPOINTED = (Shape(QUICK_TOKENS, 12), Shape(QUICK_TOKENS, 96))


def checkpoints_of(shape: Shape) -> int | None:
    """Tokens between the checkpoints that are measured on a shape beside the plain call; None if none are."""
    return CHECKPOINT_EVERY if shape in CHECKPOINTED else None


def expected_seconds(shapes: Sequence[Shape], tuned: bool) -> float:
    """Roughly how long measuring takes on an H200. tuned: whether a peer takes part that tunes itself."""
    tunings = len({(shape.heads, shape.packed) for shape in shapes}) if tuned else 0
    return _SHAPE_S * len(shapes) + _TUNING_S * tunings


def select(tokens: tuple[int, ...], heads: tuple[int, ...], quick: bool) -> list[Shape]:
    """The shapes of a run. Given `tokens` and `heads` replace the usual ones; `tokens` leave no packed shapes."""
    fixed = tokens or (QUICK_TOKENS if quick else TOKENS)
    shapes = [Shape((length,), count) for length in fixed for count in heads or HEADS]
    if not tokens:
        packed = QUICK_VARLEN if quick else VARLEN
        shapes += [Shape(lengths, count) for lengths in packed for count in heads or VARLEN_HEADS]
    return shapes


def moved_bytes(kernel: str, shape: Shape, contract: Contract, checkpoint_every: int | None = None) -> int:
    """Bytes that a kernel must move: each input and output once, without parameters, initial and final states.

    kernel: "prepare" (q, k, g, beta in, records out), "recurrence" (records and v in; out, and bf16 checkpoints if any,
    out) or "both", their sum.
    """
    rows = shape.tokens * shape.heads
    row = contract.head_dim * _BF16
    records = shape.chunks(contract.chunk) * shape.heads * contract.record.bytes
    prepare = rows * (3 * row + _BF16) + records
    state = shape.heads * contract.head_dim * row
    recurrence = records + rows * 2 * row + state * count_checkpoints(shape, checkpoint_every)
    return {"prepare": prepare, "recurrence": recurrence, "both": prepare + recurrence}[kernel]


def count_checkpoints(shape: Shape, every: int | None) -> int:
    """Checkpoints of all sequences together, a head: one for every `every` tokens begun."""
    return 0 if every is None else sum(-(-length // every) for length in shape.lengths)


def copies_past_l2(moved: int, l2_bytes: int, limit: int) -> int:
    """How many copies of a call's tensors, used in turn, keep each out of an L2 of `l2_bytes` until its next turn."""
    return max(1, min(limit, -(-2 * l2_bytes // max(moved, 1))))


def chain_floor_us(shape: Shape, chunk: int, clock_mhz: float) -> float:
    """The least time of a recurrence at an SM clock: the longest sequence's chunks, `CHAIN_CYCLES` each."""
    return CHAIN_CYCLES * shape.longest_chain(chunk) / clock_mhz


def cycles_a_chunk(us: float, shape: Shape, chunk: int, clock_mhz: float) -> float:
    """SM cycles a chunk of the longest sequence."""
    return us * clock_mhz / shape.longest_chain(chunk)
