"""The operator `torch.ops.flashkda.fwd`: `flashkda.fwd` as torch.compile, torch.export and the dispatcher see it.

Importing this module registers it. `flashkda.fwd` does so when it is traced; only code that names `torch.ops.flashkda`
itself, or runs a graph that another process traced, has to import it.
"""

from typing import Any

import torch
from torch import Tensor

from flashkda.api import run
from flashkda.arguments import refuse_gradients

_library = torch.library.Library("flashkda", "DEF")
_library.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor A_log, "
    "Tensor dt_bias, float lower_bound, Tensor? initial_state=None, Tensor(b!)? final_state=None, "
    "Tensor? cu_seqlens=None, *, Tensor(c!)? workspace=None, int? bv=None, Tensor? state_indices=None, "
    "Tensor? has_initial_state=None, Tensor(d!)? checkpoints=None, Tensor? checkpoint_cu_starts=None, "
    "int? checkpoint_every=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    bv: int | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every: int | None = None,
) -> None:
    tensors = (
        q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens, workspace,
        state_indices, has_initial_state, checkpoints, checkpoint_cu_starts,
    )  # fmt: skip
    run(tensors, scale, lower_bound, bv, checkpoint_every)


def _trace(*arguments: object, **named: object) -> None:
    # Nothing is returned, and what a call refuses depends on more than a trace knows: the run checks it.
    return None


def _refuse_gradients(keys: Any, *arguments: object, **named: object) -> None:
    # A compiled graph runs without grad mode: this is the last place where a lost gradient can be seen.
    names = [argument.name for argument in fwd.default._schema.arguments]
    refuse_gradients({**dict(zip(names, arguments, strict=False)), **named})
    with torch._C._AutoDispatchBelowAutograd():
        fwd.default.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **named)


# Every device: the checks say what is wrong with a tensor that is on none of CUDA's.
_library.impl("fwd", _launch, "CompositeExplicitAutograd")
_library.impl("fwd", _refuse_gradients, "Autograd", with_keyset=True)
torch.library.register_fake("flashkda::fwd", _trace, lib=_library)

fwd = torch.ops.flashkda.fwd
