"""Kimi Delta Attention token by token in float64, from its definition: the yardstick of accuracy, not of bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPSILON = 1e-6


def kda_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    sequences: Sequence[tuple[int, int]],
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Per token, with q and k normalised to length 1 and state S [V, K]:

        S = S Diag(exp(lower_bound * sigmoid(exp(A_log) * (g + dt_bias))))
        S = S + sigmoid(beta) (v - S k) k^T;    out = scale S q

    Args:
        q, k, v, g: [B, T, H, 128], beta: [B, T, H], any float dtype; A_log: H elements; dt_bias: H*128 elements.
        sequences: [start, end) of each of the N sequences among the B*T flattened tokens.
        initial_state: [N, H, V, K] or None for zeros.

    Returns: float64 out [B, T, H, 128] (NaN in tokens of no sequence) and final state [N, H, V, K].
    """
    heads, dim = q.shape[2:]
    queries, keys = (_normalised(x.double().reshape(-1, heads, dim)) for x in (q, k))
    values = v.double().reshape(-1, heads, dim)
    steepness = A_log.double().reshape(heads, 1).exp()
    gate = steepness * (g.double().reshape(-1, heads, dim) + dt_bias.double().reshape(heads, dim))
    decay = (lower_bound * torch.sigmoid(gate)).exp()
    rate = torch.sigmoid(beta.double()).reshape(-1, heads, 1)
    out = torch.full_like(values, torch.nan)
    states = []
    for number, (start, end) in enumerate(sequences):
        state = values.new_zeros(heads, dim, dim) if initial_state is None else initial_state[number].double()
        for token in range(start, end):
            state = state * decay[token].unsqueeze(1)
            read = torch.matmul(state, keys[token].unsqueeze(2)).squeeze(2)
            delta = rate[token] * (values[token] - read)
            state = torch.baddbmm(state, delta.unsqueeze(2), keys[token].unsqueeze(1))
            out[token] = scale * torch.matmul(state, queries[token].unsqueeze(2)).squeeze(2)
        states.append(state)
    return out.reshape(q.shape), torch.stack(states)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference|| over the elements where the reference is a number; 0 where both vanish."""
    known = ~reference.isnan()
    wanted = reference[known]
    distance = torch.linalg.vector_norm(result.double()[known] - wanted).item()
    length = torch.linalg.vector_norm(wanted).item()
    return distance / length if length else float(distance != 0)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
