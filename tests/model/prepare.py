"""What the prepare kernel computes from the decayed rows on, operation by operation, for one chunk and head.

Before this point prepare uses ex2, tanh and rsqrt, whose results come from tables in the chip; from k_decayed,
q_decayed, k_inverse (``bf(k_normalised * bf(ex2(-G)))``, which the kernel does not store), g_total and the sigmoid of
beta on, everything follows exactly. All arrays are float64 holding numbers of the dtype named.
"""

from __future__ import annotations

import numpy as np
from rounding import Float64, bf, hf
from tensor_core import matmul_bf16, matmul_fp16

CHUNK = 16


def k_restored(k_inverse: Float64, g_total: Float64) -> Float64:
    """bf16 [16, 128] from bf16 k_inverse [16, 128] and fp32 g_total [128]: the rounded k_inverse is used again."""
    return bf(k_inverse * bf(g_total))


def mqk(q_decayed: Float64, k_inverse: Float64) -> Float64:
    """Mqk, bf16 [16, 16], lower triangular with its diagonal, from bf16 [16, 128] twice."""
    return np.tril(bf(matmul_bf16(q_decayed, k_inverse.T)))


def inverse(k_decayed: Float64, k_inverse: Float64, beta: Float64) -> Float64:
    """INV = (I + L)^-1, bf16 [16, 16], as a product of fp16 Neumann factors; beta = hf(sigmoid) fp16 [16].

    L is nilpotent (strictly lower triangular, 16 rows), so (I - L)(I + L^2)(I + L^4)(I + L^8) is the whole series.
    """
    raw = hf(matmul_bf16(k_decayed, k_inverse.T))
    lower = np.where(np.tri(CHUNK, k=-1, dtype=bool), hf(raw * beta[:, None]), 0.0)
    x = hf(np.eye(CHUNK) - lower)
    power = lower
    for _ in range(3):
        power = matmul_fp16(power, power)
        x = hf(x + matmul_fp16(x, power))
    return bf(x)
