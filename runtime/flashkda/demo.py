"""A worked example: the forward of a Kimi Delta Attention (KDA) layer, and a long prompt prefilled piece by piece.

With x_t the layer's input, d = 128 and a state S [V, K] for each head, a KDA layer computes for each token t

    q_t, k_t, v_t, g_t = W_q x_t, W_k x_t, W_v x_t, W_g x_t       beta_t = sigmoid(W_beta x_t)
    alpha_t = exp(lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias)))          (the safe gate, for each channel of K)
    S_t = S_{t-1} Diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T       (q_t and k_t scaled to length 1)
    o_t = d^(-1/2) S_t q_t
    y_t = W_o (RMSNorm(o_t) * sigmoid(W_gate x_t))

`flashkda.fwd` does everything from the raw projections to o: normalisation, gate, sigmoid and recurrence. Left out here
are the short convolutions before q, k and v, and that a model factors W_g and W_gate into two thin matrices.
"""

from typing import NamedTuple

import click
import torch
from torch import Tensor

import flashkda
from flashkda.bits import same_bits

D = 128
LOWER_BOUND = -5.0
_HEADS, _HIDDEN = 8, 1024
_SLOTS, _SLOT = 8, 5


class Layer(NamedTuple):
    """A layer's parameters, for H heads."""

    W_in: Tensor  # bf16 [hidden, 5*H*D + H]: q, k, v, g, gate, beta side by side
    A_log: Tensor  # fp32 [H]
    dt_bias: Tensor  # fp32 [H, K]
    norm: Tensor  # bf16 [V], the scale of RMSNorm
    W_out: Tensor  # bf16 [H*V, hidden]

    @property
    def heads(self) -> int:
        return int(self.A_log.shape[0])


class Projected(NamedTuple):
    """What one fused projection gives for [B, T, hidden]: views of one tensor, which the kernels read where it lies."""

    q: Tensor  # bf16 [B, T, H, K]
    k: Tensor  # bf16 [B, T, H, K]
    v: Tensor  # bf16 [B, T, H, V]
    g: Tensor  # bf16 [B, T, H, K], the decay gate before its activation
    gate: Tensor  # bf16 [B, T, H, V], the output gate before its sigmoid
    beta: Tensor  # bf16 [B, T, H], before its sigmoid

    def tokens(self, start: int, stop: int) -> "Projected":
        return Projected(*(one[:, start:stop] for one in self))


def make_layer(hidden: int, heads: int, device: torch.device) -> Layer:
    """A layer with random parameters; heads: a multiple of 8, which keeps the rows of its projection aligned."""

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * rows**-0.5

    return Layer(
        W_in=normal(hidden, 5 * heads * D + heads),
        A_log=torch.rand(heads, device=device),
        dt_bias=torch.rand(heads, D, device=device),
        norm=torch.ones(D, dtype=torch.bfloat16, device=device),
        W_out=normal(heads * D, hidden),
    )


def project(layer: Layer, x: Tensor) -> Projected:
    """All projections of x [B, T, hidden] in one matrix product."""
    *rows, beta = (x @ layer.W_in).split([layer.heads * D] * 5 + [layer.heads], dim=-1)
    q, k, v, g, gate = (one.unflatten(-1, (layer.heads, D)) for one in rows)
    return Projected(q, k, v, g, gate, beta)


def attend(layer: Layer, inputs: Projected, pool: Tensor, slots: Tensor, resumed: Tensor) -> Tensor:
    """o [B, T, H, V] of B sequences, whose states [V, K] for each head are read and written where they lie.

    pool: bf16 [slots, H, V, K], which loses nothing, as the state is bf16 between the kernels' chunks of 16 tokens;
    slots: int32 [B], each sequence's slot; resumed: bool [B], False for one that starts here, from the zero state
    whatever its slot holds.
    """
    out = torch.empty(inputs.v.shape, dtype=torch.bfloat16, device=inputs.v.device)
    flashkda.fwd(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, D**-0.5, out, layer.A_log, layer.dt_bias, LOWER_BOUND,
        initial_state=pool, final_state=pool, state_indices=slots, has_initial_state=resumed,
    )  # fmt: skip
    return out


def finish(layer: Layer, out: Tensor, gate: Tensor) -> Tensor:
    """y [B, T, hidden] from o and the output gate."""
    normed = torch.nn.functional.rms_norm(out, (D,), layer.norm, eps=1e-6)
    return (normed * torch.sigmoid(gate)).flatten(-2) @ layer.W_out


def run(device: int, tokens: int, piece: int) -> int:
    """Prefill one prompt in one call and in pieces, compare bits, print a table. Returns 0 if all are equal, else 1.

    device: index among the visible CUDA devices; piece: tokens, a multiple of 16, so that pieces end where the kernels'
    chunks do. Raises `FlashKDAError` where the kernels cannot run.
    """
    flashkda.preload(device)
    where = torch.device("cuda", device)
    torch.manual_seed(0)
    with torch.inference_mode():
        layer = make_layer(_HIDDEN, _HEADS, where)
        x = torch.randn(1, tokens, _HIDDEN, dtype=torch.bfloat16, device=where)
        # Once for both: a matrix product of fewer rows may round differently, and that is not what is compared here.
        inputs = project(layer, x)
        slots = torch.full((1,), _SLOT, dtype=torch.int32, device=where)
        start_here, go_on = (torch.full((1,), flag, dtype=torch.bool, device=where) for flag in (False, True))

        def used_pool(left_behind: float) -> Tensor:
            # As a server's: nobody has cleared what an earlier request left behind.
            shape = (_SLOTS, layer.heads, D, D)
            return torch.full(shape, left_behind, dtype=torch.bfloat16, device=where)

        pool, other_pool = used_pool(1.0), used_pool(-7.0)
        whole = attend(layer, inputs, other_pool, slots, start_here)
        pieces = [(start, min(start + piece, tokens)) for start in range(0, tokens, piece)]
        outs = [
            attend(layer, inputs.tokens(start, stop), pool, slots, go_on if start else start_here)
            for start, stop in pieces
        ]
        y = finish(layer, torch.cat(outs, dim=1), inputs.gate)

        compared = [
            (f"{start}..{stop - 1}", "its slot" if start else "zero", same_bits(out, whole[:, start:stop]))
            for (start, stop), out in zip(pieces, outs, strict=True)
        ]
        compared.append(("final state", "", same_bits(pool[_SLOT], other_pool[_SLOT])))
    equal = all(same for _, _, same in compared)

    click.echo(f"A KDA layer of {layer.heads} heads on {tokens} tokens, its state in slot {_SLOT} of {_SLOTS}")
    click.echo(f"{'piece':>15}  {'starts from':<11}  against one call")
    for what, origin, same in compared:
        click.echo(f"{what:>15}  {origin:<11}  {_verdict(same)}")
    click.echo(f"The layer's output: {str(y.dtype).removeprefix('torch.')} {list(y.shape)}")
    click.echo(
        f"{len(pieces)} pieces and one call: {_verdict(equal)}, compared bit by bit in {whole.numel()} values of out "
        f"and {pool[_SLOT].numel()} of the state"
    )
    return 0 if equal else 1


def _verdict(same: bool) -> str:
    return "equal" if same else "DIFFERENT"
