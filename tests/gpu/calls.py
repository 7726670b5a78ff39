"""Calls of `flashkda.fwd` on random tensors: shapes, layouts and dtypes drawn from all that is allowed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import flashkda
from flashkda.arguments import TENSORS
from flashkda.bits import same_bits
from flashkda.call import record_order
from flashkda.goldens.cases import CHUNK, HEAD_DIM
from flashkda.goldens.record import plain_shape, stored_order
from flashkda.manifest import Record

StateDtype = Literal["none", "bf16", "fp32"]
STATE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Bytes that no call may keep or touch: out and states are prefilled with it, guard bands consist of it.
FILL = 0xA5
#: What `make_tensors` makes, in the order of `flashkda.fwd`.
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
_FIELD_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PAST_END = ("q_decayed", "mqk")


@dataclass(frozen=True)
class Shape:
    """One call. Sizes as in `flashkda.fwd`.

    in_place: final_state is initial_state; fused: q, k, v, g are slices of one projection and out, beta are strided;
    pooled: states are slots of a larger pool; spread: standard deviation of q, k, v.
    """

    T: int
    H: int
    B: int = 1
    cu_seqlens: tuple[int, ...] | None = None
    cu_dtype: torch.dtype = torch.int64
    initial: StateDtype = "bf16"
    final: StateDtype = "bf16"
    in_place: bool = False
    fused: bool = False
    pooled: bool = False
    lower_bound: float = -5.0
    scale: float = HEAD_DIM**-0.5
    spread: float = 1.0
    seed: int = 0

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """[start, end) of every sequence among the B*T flattened tokens."""
        if self.cu_seqlens is not None:
            return list(zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True))
        return [(b * self.T, (b + 1) * self.T) for b in range(self.B)]

    @property
    def tiles(self) -> int:
        """Tiles of the workspace, as this package numbers them."""
        if self.cu_seqlens is None:
            return self.B * -(-self.T // CHUNK)
        return self.T // CHUNK + len(self.sequences)

    def __str__(self) -> str:
        where = f"N{len(self.sequences)}" if self.cu_seqlens is not None else f"B{self.B}"
        layout = "fused" if self.fused else "plain"
        return f"{self.seed}-{where}-T{self.T}-H{self.H}-{self.initial}-{self.final}-{layout}"


@dataclass(frozen=True)
class Written:
    """What a call wrote, and the order of the records in the workspace."""

    out: Tensor
    final_state: Tensor | None
    workspace: Tensor
    record_order: str = ""


def draw_shape(seed: int) -> Shape:
    """A random shape: weighted to small sizes, but over every option."""
    r = random.Random(seed)
    heads = r.choice([1, 1, 2, 2, 3, 4, 5, 6, 8, r.randint(9, 40), r.choice([12, 24, 48, 64, 96]), r.randint(97, 256)])
    longest = max(24, min(3000, 60_000 // heads))
    kind = r.choices(["fixed", "packed", "many"], [35, 50, 15])[0]
    shape = Shape(
        T=0,
        H=heads,
        cu_dtype=r.choice([torch.int32, torch.int64]),
        initial=r.choice(["none", "bf16", "fp32"]),
        final=r.choice(["none", "bf16", "fp32"]),
        fused=r.random() < 0.5,
        pooled=r.random() < 0.3,
        lower_bound=r.choice([-5.0, -5.0, -4.0, -1.0, -0.1, 0.0, r.uniform(-5, 0)]),
        scale=r.choice([HEAD_DIM**-0.5, HEAD_DIM**-0.5, 1.0, 0.3, -0.7, r.uniform(1e-3, 2)]),
        spread=r.choice([1.0, 1.0, 1e-3, 30.0]),
        seed=seed,
    )
    if kind == "fixed":
        batch = r.choice([1, 1, 2, 3, 7])
        length = r.choice([r.randint(1, 40), r.randint(1, longest)])
        shape = replace(shape, B=batch, T=max(1, min(length, 200_000 // (heads * batch))))
    else:
        if kind == "many":
            shape = replace(shape, H=r.choice([1, 2]))
            lengths = [r.choice([0, 1, r.randint(0, 20)]) for _ in range(r.choice([100, 777, 2000, 4096]))]
        else:
            count = r.randint(1, 12)
            lengths = [
                r.choice([0, 1, 15, 16, 17, 32, r.randint(1, 64), r.randint(1, max(1, longest // count))])
                for _ in range(count)
            ]
        before, after = (r.choice([0, 0, r.randint(1, 40)]) for _ in range(2))
        bounds = [before]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        shape = replace(shape, T=max(1, bounds[-1] + after), cu_seqlens=tuple(bounds))
    return replace(shape, in_place=shape.initial == shape.final != "none" and r.random() < 0.5)


def make_tensors(shape: Shape, device: torch.device) -> dict[str, Tensor | None]:
    """The tensors that a call reads, by argument name; finite."""
    generator = torch.Generator(device).manual_seed(shape.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(torch.bfloat16)

    rows, width = (shape.B, shape.T), shape.H * HEAD_DIM
    tensors: dict[str, Tensor | None] = {}
    if shape.fused:
        # A gap of 24 elements (48 bytes) keeps rows aligned and the token stride unlike any power of two.
        base = normal(*rows, 4 * width + 24)
        for index, name in enumerate("qkvg"):
            tensors[name] = base[..., index * width : (index + 1) * width].unflatten(-1, (shape.H, HEAD_DIM))
        base[..., : 3 * width] *= shape.spread
        # Heads outermost half of the time: [B, H, T] seen as [B, T, H].
        beta = normal(shape.B, shape.H, shape.T).transpose(1, 2) if shape.seed % 2 else normal(*rows, shape.H + 3)
        tensors["beta"] = beta[..., : shape.H]
    else:
        for name in "qkvg":
            tensors[name] = normal(*rows, shape.H, HEAD_DIM) * (1.0 if name == "g" else shape.spread)
        tensors["beta"] = normal(*rows, shape.H)
    tensors["A_log"] = torch.rand(shape.H, generator=generator, device=device)
    tensors["dt_bias"] = torch.rand(shape.H, HEAD_DIM, generator=generator, device=device)
    tensors["initial_state"] = None
    if shape.initial != "none":
        tensors["initial_state"] = _state(shape, shape.initial, device)
        tensors["initial_state"].copy_(normal(*tensors["initial_state"].shape).float() * 0.7313)
    tensors["cu_seqlens"] = None
    if shape.cu_seqlens is not None:
        tensors["cu_seqlens"] = torch.tensor(shape.cu_seqlens, dtype=shape.cu_dtype, device=device)
    return tensors


def filled(size: int, device: torch.device) -> Tensor:
    """`size` bytes of `FILL`."""
    return torch.full((size,), FILL, dtype=torch.uint8, device=device)


def workspace_of(shape: Shape, device: torch.device) -> Tensor:
    """A prefilled workspace of the size that the package asks for."""
    return filled(flashkda.workspace_size(shape.B * shape.T, shape.H, len(shape.sequences)), device)


def make_out(shape: Shape, device: torch.device) -> Tensor:
    """A prefilled out in the shape's layout."""
    gap = 40 if shape.fused else 0
    rows = shape.B * shape.T
    base = filled(rows * (shape.H * HEAD_DIM + gap) * 2, device).view(torch.bfloat16)
    strides = (shape.H * HEAD_DIM + gap) * shape.T, shape.H * HEAD_DIM + gap, HEAD_DIM, 1
    return base.as_strided((shape.B, shape.T, shape.H, HEAD_DIM), strides)


def arguments(shape: Shape, tensors: dict[str, Tensor | None], **more: object) -> dict[str, object]:
    """The keywords of `flashkda.fwd` that the shape's tensors and numbers give, and `more` over them."""
    return {name: tensors[name] for name in NAMES} | {"scale": shape.scale, "lower_bound": shape.lower_bound} | more


def call(
    shape: Shape, tensors: dict[str, Tensor | None], record: Record, bv: int | None, workspace: Tensor | None = None
) -> Written:
    """One call on fresh outputs; an in-place state is copied first, so that `tensors` stay as they are."""
    q = tensors["q"]
    out = make_out(shape, q.device)
    initial = tensors["initial_state"]
    final = None if shape.final == "none" else _state(shape, shape.final, q.device)
    if shape.in_place:
        final.copy_(initial)
        initial = final
    if workspace is None:
        workspace = workspace_of(shape, q.device)
    results = {"out": out, "initial_state": initial, "final_state": final, "workspace": workspace}
    given = arguments(shape, tensors, **results)
    flashkda.fwd(**given, bv=bv)
    order = record_order([given[name] for name in TENSORS], shape.scale, shape.lower_bound, bv)
    return Written(out, final, workspace, order)


def assert_same(a: Written, b: Written) -> None:
    """Equal out and final_state, bit for bit."""
    assert same_bits(a.out, b.out)
    assert (a.final_state is None) == (b.final_state is None)
    if a.final_state is not None:
        assert same_bits(a.final_state, b.final_state)


def workspace_arrays(shape: Shape, written: Written, record: Record) -> dict[str, Tensor]:
    """The workspace's arrays on the device, [H, tiles, ...] with tiles as this package numbers them."""
    raw = written.workspace
    rows = raw[: shape.H * shape.tiles * record.bytes].view(-1, record.bytes)
    arrays = {}
    for field in record.fields:
        order = torch.from_numpy(stored_order(field.name, field.shape, written.record_order)).to(raw.device)
        stored = rows[:, field.offset : field.offset + field.bytes].contiguous().view(_FIELD_DTYPES[field.dtype])
        plain = stored.new_zeros(len(stored), math.prod(plain_shape(field.name, field.shape)))
        plain[:, order] = stored
        arrays[field.name] = plain.view(shape.H, shape.tiles, *plain_shape(field.name, field.shape))
    return arrays


def assert_same_workspace(shape: Shape, ours: dict[str, Tensor], spec: dict[str, Tensor]) -> None:
    """Equal records wherever a sequence owns the tile, bit for bit, but for rows past a sequence's end."""
    our_tiles, spec_tiles, lengths = [], [], []
    dense = 0
    for number, (start, end) in enumerate(shape.sequences):
        count = -(-(end - start) // CHUNK)
        base = number * count if shape.cu_seqlens is None else start // CHUNK + number
        our_tiles += range(base, base + count)
        spec_tiles += range(dense, dense + count)
        lengths += [min(CHUNK, end - start - CHUNK * c) for c in range(count)]
        dense += count
    device = next(iter(spec.values())).device
    ours_at, spec_at, length = (
        torch.tensor(x, dtype=torch.long, device=device) for x in (our_tiles, spec_tiles, lengths)
    )
    past_end = torch.arange(CHUNK, device=device)[None, :] >= length[:, None]
    for name, expected in spec.items():
        a, b = ours[name][:, ours_at], expected[:, spec_at]
        if name in _PAST_END:
            a, b = (x.masked_fill(past_end[None, :, :, None], 0.0) for x in (a, b))
        assert same_bits(a, b), name


def _state(shape: Shape, dtype: StateDtype, device: torch.device) -> Tensor:
    size = (len(shape.sequences), 2 if shape.pooled else 1, shape.H, HEAD_DIM, HEAD_DIM)
    count = size[0] * size[1] * size[2] * HEAD_DIM * HEAD_DIM
    return filled(count * STATE_DTYPES[dtype].itemsize, device).view(STATE_DTYPES[dtype]).view(size)[:, 0]
