"""What one call launches: numbers in, a frozen plan out. No torch and no CUDA here.

Names follow the kernels: a chunk is 16 tokens, a tile a chunk's slot in the workspace, BV the value columns of one
recurrence CTA.
"""

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

from flashkda.errors import ArgumentError, ArtifactError, describe
from flashkda.manifest import Artifact, Contract
from flashkda.resolver import Variants

PREPARE_POINTERS = ("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "workspace")
RECURRENCE_POINTERS = (
    "v", "out", "workspace", "initial_state", "final_state", "cu_seqlens", "state_indices", "has_initial_state",
    "checkpoints", "checkpoint_cu_starts",
)  # fmt: skip

LOG2_E = 1.4426950408889634
INT32_MAX = 2**31 - 1

# What a chunk costs a CTA beside its value columns, in units of one column, with CTAs on every SM of an H200. (Alone it
# takes 0.26, 0.32, 0.44 and 0.76 us at BV 16, 32, 64 and 128, by which this would be 48.)
_COLUMNS_A_CHUNK = 110

_FORMATS = {"pointer": "Q", "i64": "q", "i32": "i", "f32": "f"}


class Problem(NamedTuple):
    """One call's numbers.

    batch, seqlen, heads: B, T, H of q; sequences: N, which is B for fixed length and len(cu_seqlens) - 1 when packed.
    Strides are in elements: (B, T, H) for token tensors, that of the first dimension for states and checkpoints (0
    where absent). State and checkpoint dtypes are the kernels' codes: 0 none, 1 bf16, 2 fp32. slots: those of the
    smaller state pool, 0 without state_indices; checkpoints: C, their rows; checkpoint_every: in tokens, 0 without.
    `bv` is None for the automatic choice.
    """

    batch: int
    seqlen: int
    heads: int
    sequences: int
    packed: bool
    cu_seqlens_is_int64: bool
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    g_strides: tuple[int, int, int]
    beta_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    initial_stride: int
    final_stride: int
    initial_dtype: int
    final_dtype: int
    scale: float
    lower_bound: float
    bv: int | None
    slots: int = 0
    state_indices_is_int64: bool = False
    checkpoints: int = 0
    checkpoint_stride: int = 0
    checkpoint_dtype: int = 0
    checkpoint_every: int = 0
    checkpoint_starts_is_int64: bool = False


class Launch(NamedTuple):
    """One kernel launch.

    grid: CTAs in x; parameters: the parameter block with every scalar in place and the leading pointers still zero.
    """

    artifact: Artifact
    grid: int
    parameters: bytes


class Plan(NamedTuple):
    """All of one call, in launch order; a kernel that would have nothing to do is None."""

    bv: int
    total_tiles: int
    workspace_bytes: int
    prepare: Launch | None
    recurrence: Launch | None


def make_plan(problem: Problem, contract: Contract, variants: Variants, sm_count: int) -> Plan:
    """Plan a call on a device with `sm_count` SMs. Raises `ArgumentError` (bv, sizes) or `ArtifactError`."""
    total_tiles = count_tiles(problem, contract.chunk)
    _require_int32("sequence length T", problem.seqlen)
    _require_int32("number of sequences N", problem.sequences)
    _require_int32("number of heads H", problem.heads)
    _require_int32("number of state slots", problem.slots)
    _require_int32("number of checkpoints C", problem.checkpoints)
    # The grids are numbered in 32 bits.
    _require_int32("number of 16-token tiles times heads", total_tiles * problem.heads)

    bv = choose_bv(problem, contract.head_dim, tuple(variants.recurrence), sm_count)
    tokens = problem.batch * problem.seqlen
    prepare = None
    if tokens and problem.heads and problem.sequences:
        artifact = variants.prepare_for(bv)
        # A CTA takes consecutive tiles of one head.
        grid = problem.heads * -(-total_tiles // artifact.units_per_cta)
        prepare = _launch(artifact, grid, PREPARE_POINTERS, _prepare_scalars(problem, total_tiles))
    recurrence = None
    if problem.sequences and problem.heads and (tokens or problem.final_dtype):
        recurrence = _launch(
            variants.recurrence[bv],
            problem.sequences * problem.heads * (contract.head_dim // bv),
            RECURRENCE_POINTERS,
            _recurrence_scalars(problem, total_tiles, contract.chunk),
        )
    workspace = problem.heads * total_tiles * contract.record.bytes if prepare is not None else 0
    return Plan(bv, total_tiles, workspace, prepare, recurrence)


def count_tiles(problem: Problem, chunk: int) -> int:
    """Tiles of the workspace: N*ceil(T/chunk) for fixed length, floor(T/chunk)+N when packed."""
    if problem.packed:
        return problem.seqlen // chunk + problem.sequences
    return problem.sequences * -(-problem.seqlen // chunk)


def workspace_bound(num_tokens: int, num_heads: int, num_seqs: int, contract: Contract) -> int:
    """Bytes that suffice for either layout.

    ceil(L/16) <= floor(L/16) + 1, so the N*ceil(T/16) tiles of a fixed-length call never pass the packed count for the
    same tokens.
    """
    return (num_tokens // contract.chunk + num_seqs) * num_heads * contract.record.bytes


def choose_bv(problem: Problem, head_dim: int, available: tuple[int, ...], sm_count: int) -> int:
    """The caller's BV, else the one whose CTAs should be done first.

    Sequences of one length: the smallest BV that gives every CTA its own SM, else the largest. Fewer columns a CTA make
    the serial chain shorter only while all CTAs run at once.
    """
    if problem.bv is not None:
        if problem.bv not in available:
            allowed = f"None or one of {', '.join(map(str, available))}, the compiled ones"
            raise ArgumentError("bv", describe(problem.bv), allowed, "leave bv out for the automatic choice")
        return problem.bv
    several_lengths = problem.packed and problem.sequences > 1
    widest = max(available)

    def cost(bv: int) -> float:
        ctas_per_sm = problem.sequences * problem.heads * (head_dim // bv) / sm_count
        rounds = _rounds_of_any_lengths(ctas_per_sm, bv < widest) if several_lengths else math.ceil(ctas_per_sm)
        return rounds * (_COLUMNS_A_CHUNK + bv)

    return min(sorted(available), key=cost)


def _rounds_of_any_lengths(ctas_per_sm: float, alone: bool) -> float:
    """How many sequences of middling length an SM runs one after the other; the host does not read cu_seqlens.

    CTAs start longest first. Where they have an SM alone, a few more than there are SMs are short ones that follow
    other short ones, at no cost; of the widest two share an SM, at half the pace. Many even out, up to about a quarter.
    """
    if ctas_per_sm <= (9 / 8 if alone else 1):
        return 1
    return max(2, ctas_per_sm + 1 / 4)


def _prepare_scalars(problem: Problem, total_tiles: int) -> dict[str, int | float]:
    return {
        **_strides("q", problem.q_strides),
        **_strides("k", problem.k_strides),
        **_strides("g", problem.g_strides),
        **_strides("beta", problem.beta_strides),
        **_sizes(problem, total_tiles),
        "scale": problem.scale,
        # A float64 product and one rounding to float32, as the original's host code has it.
        "gate_scale": problem.lower_bound * LOG2_E,
    }


def _recurrence_scalars(problem: Problem, total_tiles: int, chunk: int) -> dict[str, int | float]:
    return {
        **_strides("v", problem.v_strides),
        **_strides("out", problem.out_strides),
        "initial_stride_n": problem.initial_stride,
        "final_stride_n": problem.final_stride,
        "checkpoint_stride_n": problem.checkpoint_stride,
        **_sizes(problem, total_tiles),
        "initial_dtype": problem.initial_dtype,
        "final_dtype": problem.final_dtype,
        "state_indices_is_int64": int(problem.state_indices_is_int64),
        "num_slots": problem.slots,
        "checkpoint_dtype": problem.checkpoint_dtype,
        "num_checkpoints": problem.checkpoints,
        "checkpoint_chunks": problem.checkpoint_every // chunk,
        "checkpoint_starts_is_int64": int(problem.checkpoint_starts_is_int64),
    }


def _sizes(problem: Problem, total_tiles: int) -> dict[str, int]:
    return {
        "seqlen": problem.seqlen,
        "num_seqs": problem.sequences,
        "num_heads": problem.heads,
        "total_tiles": total_tiles,
        "cu_seqlens_is_int64": int(problem.cu_seqlens_is_int64),
    }


def _strides(name: str, strides: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip((f"{name}_stride_b", f"{name}_stride_t", f"{name}_stride_h"), strides, strict=True))


def _launch(artifact: Artifact, grid: int, pointers: tuple[str, ...], scalars: Mapping[str, int | float]) -> Launch:
    _require_int32(f"grid of {artifact.kernel}", grid)
    return Launch(artifact, grid, pack_parameters(artifact, pointers, scalars))


def pack_parameters(artifact: Artifact, pointers: tuple[str, ...], scalars: Mapping[str, int | float]) -> bytes:
    """The parameter block as the cubin lays it out, little-endian, pointers zero.

    Raises `ArtifactError` unless the artifact's parameters are exactly these pointers, first and without gaps (they are
    rewritten at every call), and these scalars, in any order.
    """
    leading = [(found.name, found.type, found.offset) for found in artifact.parameters[: len(pointers)]]
    rest = artifact.parameters[len(pointers) :]
    names = {found.name for found in rest}
    if leading != [(name, "pointer", 8 * index) for index, name in enumerate(pointers)] or names != set(scalars):
        listed = ", ".join(found.name for found in artifact.parameters)
        raise ArtifactError(
            f"{artifact.file} takes the parameters {listed}, but {artifact.kernel} is launched with "
            f"{', '.join([*pointers, *scalars])}; rebuild or reinstall so that kernels and runtime agree"
        )
    block = bytearray(artifact.parameters[-1].offset + artifact.parameters[-1].size)
    for found in rest:
        try:
            struct.pack_into("<" + _FORMATS[found.type], block, found.offset, scalars[found.name])
        except struct.error as error:
            raise ArtifactError(
                f"{artifact.file} declares parameter {found.name} as {found.type}, which cannot hold "
                f"{scalars[found.name]!r}; rebuild or reinstall so that kernels and runtime agree"
            ) from error
    return bytes(block)


def _require_int32(what: str, value: int) -> None:
    if value > INT32_MAX:
        raise ArgumentError(f"the {what}", str(value), f"at most {INT32_MAX}", "split the call")
