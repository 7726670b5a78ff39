"""What the recurrence kernel computes, operation by operation, for one sequence and head.

D = K = V = 128, chunk = 16. All arrays are float64 holding numbers of the dtype named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rounding import Float64, bf, fma_ftz
from tensor_core import matmul_bf16

CHUNK = 16
HEAD_DIM = 128


@dataclass(frozen=True)
class Record:
    """The workspace records of one sequence and head: one entry a chunk in the first dimension."""

    k_decayed: Float64  # bf16 [C, 16, 128]
    q_decayed: Float64  # bf16 [C, 16, 128]
    k_restored: Float64  # bf16 [C, 16, 128]
    g_total: Float64  # fp32 [C, 128]
    inv: Float64  # bf16 [C, 16, 16]
    mqk: Float64  # bf16 [C, 16, 16]


def chunk_step(state: Float64, record: Record, chunk: int, v: Float64, beta: Float64) -> tuple[Float64, Float64]:
    """One chunk: state bf16 [128 v, 128 k], v bf16 [16, 128], beta = bf(sigmoid) [16] -> (out [16, 128], state)."""
    state_t = state.T
    projected = bf(matmul_bf16(record.k_decayed[chunk], state_t))
    out_state = bf(matmul_bf16(record.q_decayed[chunk], state_t))
    delta = bf(bf(v - projected) * beta[:, None])
    solved = bf(matmul_bf16(record.inv[chunk], delta))
    out = bf(out_state + bf(matmul_bf16(record.mqk[chunk], solved)))
    update = matmul_bf16(solved.T, record.k_restored[chunk])
    return out, bf(fma_ftz(state, record.g_total[chunk], update))


def recurrence(record: Record, v: Float64, beta: Float64, initial_state: Float64) -> tuple[Float64, Float64]:
    """A whole sequence: v bf16 [T, 128], beta = bf(sigmoid) [T], state [128, 128] -> (out bf16 [T, 128], state bf16).

    Rows past the end of the last chunk are zero. An fp32 initial state is rounded to bf16 on entry, also when T = 0.
    """
    length = v.shape[0]
    chunks = -(-length // CHUNK)
    padded_v = np.zeros((chunks * CHUNK, HEAD_DIM))
    padded_v[:length] = v
    padded_beta = np.zeros(chunks * CHUNK)
    padded_beta[:length] = beta
    out = np.empty((chunks * CHUNK, HEAD_DIM))
    state = bf(initial_state)
    for c in range(chunks):
        rows = slice(c * CHUNK, (c + 1) * CHUNK)
        out[rows], state = chunk_step(state, record, c, padded_v[rows], padded_beta[rows])
    return out[:length], state
