"""Calls whose states lie in pools, start from zero, or are kept on the way (checkpoints), and what they must write.

What is expected comes from calls with dense states alone: gather, call and scatter for pools; for each checkpoint the
final states of a call on the sequences cut there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from calls import (
    FILL,
    NAMES,
    STATE_DTYPES,
    Shape,
    StateDtype,
    arguments,
    call,
    draw_shape,
    make_out,
    make_tensors,
    workspace_of,
)
from torch import Tensor

import flashkda
from flashkda.bits import same_bits
from flashkda.goldens.cases import HEAD_DIM
from flashkda.manifest import Record

_SLOT = HEAD_DIM * HEAD_DIM
#: Slots around each pool that no call may touch, so that a slot or row just outside one shows.
_GUARD = 2


@dataclass(frozen=True)
class StateCall:
    """One call; N sequences as `shape` has them, whose `initial`, `final`, `in_place` are those of the pools.

    state_indices: N slots, or None: sequence n has slot n. slots: of the initial and of the final pool, used only with
    indices. gap: elements between slots (a multiple of 8). capacity: rows of the checkpoints, if there are any.
    """

    shape: Shape
    state_indices: tuple[int, ...] | None = None
    index_dtype: torch.dtype = torch.int32
    slots: tuple[int, int] = (0, 0)
    gap: int = 0
    has_initial_state: tuple[bool, ...] | None = None
    checkpoint_every: int = 0
    checkpoint_dtype: Literal["bf16", "fp32"] = "bf16"
    checkpoint_cu_starts: tuple[int, ...] | None = None
    starts_dtype: torch.dtype = torch.int64
    capacity: int = 0

    @property
    def num_slots(self) -> int:
        """An index past this is padding: it must lie in each pool that there is."""
        given = zip((self.shape.initial, self.shape.final), self.slots, strict=True)
        return min(slots for dtype, slots in given if dtype != "none")

    @property
    def live(self) -> list[int]:
        """The sequences that are no padding."""
        number = len(self.shape.sequences)
        if self.state_indices is None:
            return list(range(number))
        return [n for n in range(number) if 0 <= self.state_indices[n] < self.num_slots]

    @property
    def resumed(self) -> list[int]:
        """The sequences that start from a state which is read."""
        if self.shape.initial == "none":
            return []
        return [n for n in self.live if self.has_initial_state is None or self.has_initial_state[n]]

    def slots_of(self, sequences: list[int]) -> list[int]:
        return sequences if self.state_indices is None else [self.state_indices[n] for n in sequences]

    @property
    def checkpoint_rows(self) -> list[tuple[int, int, int]]:
        """(sequence, checkpoint, row) of everything that is stored."""
        if not self.checkpoint_every:
            return []
        rows = []
        for n in self.live:
            start, end = self.shape.sequences[n]
            count = -(-(end - start) // self.checkpoint_every)
            if self.checkpoint_cu_starts is None:
                first = n * -(-self.shape.T // self.checkpoint_every)
                past = first + count
            else:
                first, past = self.checkpoint_cu_starts[n : n + 2]
            rows += [(n, j, first + j) for j in range(count) if first + j < past and 0 <= first + j < self.capacity]
        return rows


@dataclass(frozen=True)
class Pool:
    """slots [slots, H, V, K] within storage, the bytes of all of it: gaps and guards too."""

    storage: Tensor
    slots: Tensor

    def clone(self) -> Pool:
        storage = self.storage.clone()
        view = storage.view(self.slots.dtype)
        return Pool(storage, view.as_strided(self.slots.shape, self.slots.stride(), self.slots.storage_offset()))


def make_pool(
    slots: int,
    heads: int,
    dtype: StateDtype,
    device: torch.device,
    gap: int = 0,
    fill: int | None = FILL,
    guard: int = _GUARD,
) -> Pool:
    """A pool of bytes `fill`, or uninitialised (None), with `guard` slots before and after."""
    stride = heads * _SLOT + gap
    size = ((slots + 2 * guard) * stride - gap) * STATE_DTYPES[dtype].itemsize
    storage = torch.empty(size, dtype=torch.uint8, device=device)
    if fill is not None:
        storage.fill_(fill)
    shape, strides = (slots, heads, HEAD_DIM, HEAD_DIM), (stride, _SLOT, HEAD_DIM, 1)
    return Pool(storage, storage.view(STATE_DTYPES[dtype]).as_strided(shape, strides, guard * stride))


@dataclass(frozen=True)
class Made:
    """A call's tensors: `arguments` are the keywords of `flashkda.fwd` but for workspace and bv."""

    arguments: dict[str, object]
    pools: dict[str, Pool]

    def fresh(self) -> Made:
        """The same call on results, and pools, of its own."""
        # One clone of a pool that is both states.
        clones = {id(pool): pool.clone() for pool in self.pools.values()}
        pools = {name: clones[id(pool)] for name, pool in self.pools.items()}
        out = self.arguments["out"]
        blank = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(out)
        return Made(self.arguments | {"out": blank} | {name: pool.slots for name, pool in pools.items()}, pools)

    def load(self, other: Made) -> None:
        """Take over the contents of another call's tensors, as one does between replays of a graph."""
        for name, tensor in self.arguments.items():
            if isinstance(tensor, Tensor) and name not in self.pools:
                tensor.copy_(other.arguments[name])
        for name, pool in self.pools.items():
            pool.storage.copy_(other.pools[name].storage)

    @property
    def bytes(self) -> dict[str, Tensor]:
        """All that a call may have written to, by argument."""
        return {"out": self.arguments["out"]} | {name: pool.storage for name, pool in self.pools.items()}


def make(case: StateCall, device: torch.device, fill: int | None = FILL, guard: int = _GUARD) -> Made:
    """Random tokens and states; every slot that no sequence resumes from, and every checkpoint row, is `fill`.

    fill: a byte, 0xFF being NaN; None leaves such memory, and out, uninitialised.
    """
    shape = case.shape
    number = len(shape.sequences)
    tensors = make_tensors(replace(shape, initial="none"), device)
    slots = case.slots if case.state_indices is not None else (number, number)
    pools = {}
    if shape.initial != "none":
        pool = pools["initial_state"] = make_pool(slots[0], shape.H, shape.initial, device, case.gap, fill, guard)
        generator = torch.Generator(device).manual_seed(shape.seed + 1)
        states = torch.randn(len(case.resumed), *pool.slots.shape[1:], generator=generator, device=device)
        pool.slots[_indices(case.slots_of(case.resumed), device)] = (states * 0.7313).to(pool.slots.dtype)
    if shape.in_place:
        pools["final_state"] = pools["initial_state"]
    elif shape.final != "none":
        pools["final_state"] = make_pool(slots[1], shape.H, shape.final, device, case.gap, fill, guard)
    more = {}
    if case.state_indices is not None:
        more["state_indices"] = torch.tensor(case.state_indices, dtype=case.index_dtype, device=device)
    if case.has_initial_state is not None:
        more["has_initial_state"] = torch.tensor(case.has_initial_state, dtype=torch.bool, device=device)
    if case.checkpoint_every:
        pools["checkpoints"] = make_pool(case.capacity, shape.H, case.checkpoint_dtype, device, case.gap, fill, guard)
        more["checkpoint_every"] = case.checkpoint_every
        if case.checkpoint_cu_starts is not None:
            more["checkpoint_cu_starts"] = torch.tensor(
                case.checkpoint_cu_starts, dtype=case.starts_dtype, device=device
            )
    out = make_out(shape, device) if fill is not None else torch.empty_like(tensors["v"])
    states = {"initial_state": None, "final_state": None} | {name: pool.slots for name, pool in pools.items()}
    return Made(arguments(shape, tensors, out=out, **(more | states)), pools)


def expected(case: StateCall, made: Made, record: Record) -> dict[str, Tensor]:
    """What `made.bytes` must hold after the call; to be taken before it."""
    shape = replace(case.shape, in_place=False, pooled=False)
    tensors = {name: made.arguments[name] for name in NAMES}
    device = tensors["q"].device
    start = None
    if "initial_state" in made.pools:
        slots = made.pools["initial_state"].slots
        start = torch.zeros(len(shape.sequences), *slots.shape[1:], dtype=slots.dtype, device=device)
        resumed = _indices(case.resumed, device)
        start[resumed] = slots[_indices(case.slots_of(case.resumed), device)]
    tensors["initial_state"] = start
    written = call(shape, tensors, record, None)
    wanted = made.fresh()
    live = _indices(case.live, device)
    rows, blank = (x.reshape(shape.B * shape.T, shape.H, HEAD_DIM) for x in (written.out, wanted.arguments["out"]))
    owned = torch.zeros(shape.B * shape.T, 1, 1, dtype=torch.bool, device=device)
    for start_of, end_of in (shape.sequences[n] for n in case.live):
        owned[start_of:end_of] = True
    wanted.arguments["out"].copy_(torch.where(owned, rows, blank).view(written.out.shape))
    if written.final_state is not None:
        wanted.pools["final_state"].slots[_indices(case.slots_of(case.live), device)] = written.final_state[live]
    for j in sorted({j for _, j, _ in case.checkpoint_rows}):
        states = _states_before(shape, tensors, j * case.checkpoint_every, record)
        stored = [(n, row) for n, at, row in case.checkpoint_rows if at == j]
        sequences, rows = (_indices(column, device) for column in zip(*stored, strict=True))
        checkpoints = wanted.pools["checkpoints"].slots
        checkpoints[rows] = states[sequences].to(checkpoints.dtype)
    return wanted.bytes


def assert_written(made: Made, wanted: dict[str, Tensor]) -> None:
    """Every byte that the call wrote or left is the expected one."""
    for name, tensor in made.bytes.items():
        assert same_bits(tensor, wanted[name]), name


def assert_served(
    case: StateCall, device: torch.device, record: Record, bvs: Iterable[int | None], fill: int = FILL
) -> None:
    """A call with each BV writes what is expected and nothing else."""
    made = make(case, device, fill)
    wanted = expected(case, made, record)
    for bv in bvs:
        given = made.fresh()
        flashkda.fwd(**given.arguments, workspace=workspace_of(case.shape, device), bv=bv)
        assert_written(given, wanted)


def draw_state_call(seed: int, checkpoints: bool, shape: Shape | None = None) -> StateCall:
    """A random call on `shape`, or one of `draw_shape`'s, made small enough for a pool of its states."""
    r = random.Random(f"pool {seed}")
    if shape is None:
        shape = draw_shape(seed)
    if shape.T * shape.H > 20_000:
        shape = replace(shape, H=1 + seed % 3)
    if shape.cu_seqlens is not None:
        shape = replace(shape, cu_seqlens=shape.cu_seqlens[: 1 + max(1, 600 // shape.H)])
    number = len(shape.sequences)
    kind = r.choice(["in_place", "in_place", "two_pools", "two_pools", "read", "write", "dense"])
    initial, final = r.choice(["bf16", "fp32"]), r.choice(["bf16", "fp32"])
    if kind == "in_place":
        final = initial
    elif kind in ("read", "write"):
        initial, final = (initial, "none") if kind == "read" else ("none", final)
    shape = replace(shape, initial=initial, final=final, in_place=kind == "in_place", pooled=False)
    case = StateCall(shape, gap=r.choice([0, 8, 64, 4096]))
    if kind != "dense":
        index_dtype = r.choice([torch.int32, torch.int64])
        least = number + r.choice([0, 1, 9])
        slots = [least, least + (0 if kind == "in_place" else r.choice([0, 3]))]
        r.shuffle(slots)
        indices = r.sample(range(least), number)
        for n in range(number):
            if r.random() < 0.2:
                indices[n] = r.choice(padding_indices(least, index_dtype))
        case = replace(case, state_indices=tuple(indices), index_dtype=index_dtype, slots=tuple(slots))
    if initial != "none" and r.random() < 0.5:
        case = replace(case, has_initial_state=tuple(r.random() < 0.5 for _ in range(number)))
    return _with_checkpoints(case, r) if checkpoints else case


def padding_indices(num_slots: int, dtype: torch.dtype) -> list[int]:
    """Indices that lie in no pool of `num_slots` slots; cut to 32 bits, some would."""
    found = [-1, -7, -(2**31), num_slots, num_slots + 1, 2**31 - 1]
    if dtype == torch.int64:
        found += [-(2**32), 2**32, 2**32 + num_slots - 1, -(2**63), 2**63 - 1]
    return found


def _with_checkpoints(case: StateCall, r: random.Random) -> StateCall:
    lengths = [end - start for start, end in case.shape.sequences]
    every = r.choice([16, 16, 32, 48, 64, 128, 4096])
    # The reference is a call for each checkpoint of the longest sequence.
    every = max(every, -(-max(lengths) // (12 * 16)) * 16)
    starts = None
    capacity = len(lengths) * -(-case.shape.T // every)
    if case.shape.cu_seqlens is not None or r.random() < 0.5:
        # Some sequences own more rows than they fill, some fewer than they could.
        starts = [r.choice([0, 0, 3])]
        for length in lengths:
            starts.append(starts[-1] + max(0, -(-length // every) + r.choice([0, 0, 0, 1, -1])))
        capacity = starts[-1]
    return replace(
        case,
        checkpoint_every=every,
        checkpoint_dtype=r.choice(["bf16", "fp32"]),
        checkpoint_cu_starts=None if starts is None else tuple(starts),
        starts_dtype=r.choice([torch.int32, torch.int64]),
        capacity=max(1, capacity + r.choice([0, 0, 2, -1, -4])),
    )


def _states_before(shape: Shape, tensors: dict[str, Tensor | None], token: int, record: Record) -> Tensor:
    """bf16 [N, H, V, K]: final states of the sequences cut to `token` tokens; a shorter one's is its last."""
    # Packed, each sequence followed by what was cut off, which is nobody's business but keeps the numbering.
    bounds = [shape.sequences[0][0]]
    for start, end in shape.sequences:
        bounds += [min(end, start + token), end]
    cut = replace(shape, T=shape.B * shape.T, B=1, cu_seqlens=tuple(bounds), final="bf16", fused=False)
    start = tensors["initial_state"]
    packed = {name: tensors[name].flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    packed["initial_state"] = None if start is None else start.repeat_interleave(2, 0)
    packed["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int64, device=tensors["q"].device)
    return call(cut, tensors | packed, record, None).final_state[::2]


def _indices(numbers: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long, device=device)
