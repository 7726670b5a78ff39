"""Floating-point formats of the kernels, on float64 arrays.

Every value lives in a float64 array; a format is a property of the numbers, not of the array. Products of two bf16 or
fp16 numbers are exact in float64, and so is what the tensor core adds, so the only roundings are the ones named here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A binary format: ``fraction`` bits after the leading one, smallest normal exponent, largest finite value."""

    fraction: int
    min_exponent: int
    largest: float


BF16 = Format(fraction=7, min_exponent=-126, largest=float.fromhex("0x1.fep127"))
FP16 = Format(fraction=10, min_exponent=-14, largest=65504.0)
FP32 = Format(fraction=23, min_exponent=-126, largest=float.fromhex("0x1.fffffep127"))


def exponent(x: Float64, form: Format) -> NDArray[np.int64]:
    """Exponent of each number as stored in ``form``: floor(log2 |x|), at least the format's minimum (also for 0)."""
    _, e = np.frexp(x)
    return np.maximum(np.where(x == 0, form.min_exponent, e.astype(np.int64) - 1), form.min_exponent)


def _quantum(x: Float64, form: Format) -> Float64:
    return np.ldexp(np.ones_like(x), (exponent(x, form) - form.fraction).astype(np.int32))


def nearest(x: Float64, form: Format) -> Float64:
    """Round to nearest even; subnormals kept, overflow to infinity."""
    quantum = _quantum(x, form)
    rounded = np.rint(x / quantum) * quantum
    return np.where(np.abs(rounded) > form.largest, np.copysign(np.inf, x), rounded)


def toward_zero(x: Float64, form: Format) -> Float64:
    """Truncate toward zero; subnormals kept, overflow to infinity."""
    quantum = _quantum(x, form)
    cut = np.trunc(x / quantum) * quantum
    return np.where(np.abs(cut) > form.largest, np.copysign(np.inf, x), cut)


def flush(x: Float64) -> Float64:
    """FTZ: an fp32 subnormal becomes a zero of the same sign."""
    return np.where(np.abs(x) < 2.0**FP32.min_exponent, np.copysign(0.0, x), x)


def bf(x: Float64) -> Float64:
    """Round to bf16, nearest even."""
    return nearest(x, BF16)


def hf(x: Float64) -> Float64:
    """Round to fp16, nearest even."""
    return nearest(x, FP16)


def fp32_ftz(x: Float64) -> Float64:
    """The fp32 result of an operation whose exact value is ``x``, with FTZ."""
    return flush(nearest(x, FP32))


def fma_ftz(a: Float64, b: Float64, c: Float64) -> Float64:
    """fp32 fused multiply-add with FTZ: one rounding of a*b + c. ``a * b`` must be exact in float64 (24 + 24 bits is).

    float64 addition may itself round, and two roundings are not one: the error of the addition is recovered (two-sum)
    and folded into the last bit (round to odd), after which rounding to fp32 is correct.
    """
    product = flush(a) * flush(b)
    addend = flush(c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return fp32_ftz(odd)


def from_bf16_bits(bits: NDArray[np.uint16]) -> Float64:
    """bf16 bits to values."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def from_fp32_bits(bits: NDArray[np.uint32]) -> Float64:
    """fp32 bits to values."""
    return bits.view(np.float32).astype(np.float64)


def to_bf16_bits(x: Float64) -> NDArray[np.uint16]:
    """Values that are bf16 numbers to bits; NaN becomes the canonical 0x7FFF."""
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def to_fp32_bits(x: Float64) -> NDArray[np.uint32]:
    """Values that are fp32 numbers to bits."""
    return x.astype(np.float32).view(np.uint32)
