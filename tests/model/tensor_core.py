"""The tensor core's summation rule, as measured on sm_90 (mma.sync.m16n8k16, bf16 or fp16 inputs).

The 16 products of one k block and the accumulator are added as one block, not one after another:

* a product a*b has the exponent ea + eb (the significands' product is not renormalised; a subnormal input has the
  minimum exponent), the accumulator its own;
* E is the largest exponent among the terms that are not zero;
* each term is truncated toward zero to a multiple of 2**(E - 25);
* the exact sum of these is truncated toward zero to fp32 (fp32 accumulators; subnormals kept, a zero is always +0) or
  rounded once, nearest even, to fp16 (fp16 accumulators, which here always start at zero).

So the order inside one k block is free, but the order of blocks, their size and the start value are not. Known for
finite inputs; NaN and Inf are outside the model.
"""

from __future__ import annotations

import numpy as np
from rounding import BF16, FP16, FP32, Float64, Format, exponent, hf, toward_zero

BLOCK = 16
_KEPT_BITS = 25
_NO_TERM = -10_000


def _block_sum(a: Float64, b: Float64, c: Float64, form: Format) -> Float64:
    """Exact sum of truncated terms: a [..., M, 16], b [..., 16, N], c [..., M, N] -> [..., M, N]."""
    b = np.swapaxes(b, -1, -2)
    terms = a[..., :, None, :] * b[..., None, :, :]
    exponents = exponent(a, form)[..., :, None, :] + exponent(b, form)[..., None, :, :]
    largest = np.where(terms != 0, exponents, _NO_TERM).max(axis=-1)
    largest = np.maximum(largest, np.where(c != 0, exponent(c, FP32), _NO_TERM))
    largest = np.where(largest == _NO_TERM, 0, largest)
    unit = np.ldexp(np.ones_like(c), (largest - _KEPT_BITS).astype(np.int32))
    return (np.trunc(terms / unit[..., None]).sum(axis=-1) + np.trunc(c / unit)) * unit


def _zeros(a: Float64, b: Float64) -> Float64:
    return np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))


def matmul_bf16(a: Float64, b: Float64) -> Float64:
    """bf16 a [..., M, K] @ bf16 b [..., K, N] -> fp32 [..., M, N]; k blocks of 16 chained in order from +0."""
    acc = _zeros(a, b)
    for k in range(0, a.shape[-1], BLOCK):
        block = _block_sum(a[..., k : k + BLOCK], b[..., k : k + BLOCK, :], acc, BF16)
        acc = toward_zero(block, FP32) + 0.0  # -0 + 0 is +0: the sum is an integer, its zero has no sign
    return acc


def matmul_fp16(a: Float64, b: Float64) -> Float64:
    """fp16 a [..., M, 16] @ fp16 b [..., 16, N] -> fp16 [..., M, N], accumulated in one block and rounded once."""
    return hf(_block_sum(a, b, _zeros(a, b), FP16))
