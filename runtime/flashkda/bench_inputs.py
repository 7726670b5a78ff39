"""Tensors for one shape, as often as it takes to go past the L2 cache."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashkda.api import workspace_size
from flashkda.bench_shapes import Shape
from flashkda.manifest import Contract

LOWER_BOUND = -5.0
_SEED = 20260420


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call by their names in `flashkda.fwd`; states are bf16, cu_seqlens int64 or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    out: Tensor
    A_log: Tensor
    dt_bias: Tensor
    initial_state: Tensor
    final_state: Tensor
    cu_seqlens: Tensor | None
    workspace: Tensor
    _by_order: dict[str, Tensor] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def workspace_for(self, record_order: str) -> Tensor:
        """A workspace for records of this order alone: `workspace` for the first that is asked for, then new ones."""
        if record_order not in self._by_order:
            self._by_order[record_order] = torch.empty_like(self.workspace) if self._by_order else self.workspace
        return self._by_order[record_order]


def make_inputs(shape: Shape, contract: Contract, device: torch.device, copies: int) -> list[Inputs]:
    """`copies` independent sets of tensors; only the parameters and cu_seqlens are shared."""
    generator = torch.Generator(device).manual_seed(_SEED)
    dim, heads, sequences = contract.head_dim, shape.heads, len(shape.lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.bfloat16, device=device)

    cu_seqlens = None
    if shape.packed:
        cu_seqlens = torch.tensor((0, *shape.lengths), device=device).cumsum(0)
    a_log = torch.rand(heads, generator=generator, device=device)
    dt_bias = torch.rand(heads, dim, generator=generator, device=device)
    rows = (1, shape.tokens, heads, dim)
    states = (sequences, heads, dim, dim)
    return [
        Inputs(
            q=normal(*rows),
            k=normal(*rows),
            v=normal(*rows),
            g=normal(*rows),
            beta=normal(*rows[:3]),
            out=torch.empty(rows, dtype=torch.bfloat16, device=device),
            A_log=a_log,
            dt_bias=dt_bias,
            initial_state=normal(*states) * 0.5,
            final_state=torch.empty(states, dtype=torch.bfloat16, device=device),
            cu_seqlens=cu_seqlens,
            workspace=torch.empty(workspace_size(shape.tokens, heads, sequences), dtype=torch.uint8, device=device),
        )
        for _ in range(copies)
    ]
