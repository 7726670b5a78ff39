"""The goldens' inputs, the same bits on every machine and numpy version.

A tensor's bits come from PCG64(SeedSequence([seed, tensor number])).random_raw, whose stream numpy promises never to
change, in C order; no library distribution and no libm is involved. Values are formed in float64, rounded to fp32, and
for bf16 tensors rounded again, nearest even.
"""

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashkda.goldens.cases import HEAD_DIM, Case, Values

_STREAMS = {"q": 0, "k": 1, "v": 2, "g": 3, "beta": 4, "A_log": 5, "dt_bias": 6, "initial_state": 7}
_HASHED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")

Inputs: TypeAlias = "dict[str, NDArray[np.generic]]"


def to_bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """fp32 to bf16 bits, nearest even; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def make_inputs(case: Case) -> Inputs:
    """The tensors of a case by argument name, absent ones left out.

    q, k, v, g [B, T, H, 128] and beta [B, T, H]: uint16 bf16 bits; A_log [H], dt_bias [H, 128]: float32;
    initial_state [N, H, 128, 128]: float32 or uint16 bf16 bits; cu_seqlens [N + 1]: int64.
    """
    tokens = (case.B, case.T, case.H)
    inputs: Inputs = {}
    bits: dict[str, NDArray[np.uint16]] = {}
    for name, values in (("q", case.q), ("k", case.k), ("v", case.v), ("g", case.g)):
        bits[name] = to_bf16_bits(_fill(values, case.seed, name, (*tokens, HEAD_DIM)))
    bits["beta"] = to_bf16_bits(_fill(case.beta, case.seed, "beta", tokens))
    if case.poison is not None:
        bits[case.poison.tensor][case.poison.index] = case.poison.bits
    inputs.update(bits)
    inputs["A_log"] = _fill(case.A_log, case.seed, "A_log", (case.H,))
    inputs["dt_bias"] = _fill(case.dt_bias, case.seed, "dt_bias", (case.H, HEAD_DIM))
    if case.has_initial:
        shape = (len(case.sequences), case.H, HEAD_DIM, HEAD_DIM)
        state = _fill(case.initial_state, case.seed, "initial_state", shape)
        inputs["initial_state"] = state if case.state == "fp32" else to_bf16_bits(state)
    if case.cu_seqlens is not None:
        inputs["cu_seqlens"] = np.asarray(case.cu_seqlens, dtype=np.int64)
    return inputs


def inputs_sha256(inputs: Inputs) -> str:
    """One digest over names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in _HASHED:
        if name in inputs:
            array = inputs[name]
            # The recorded digests call this one by its short name.
            label = "cu" if name == "cu_seqlens" else name
            digest.update(f"{label}{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _fill(values: Values, seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if values.kind == "const":
        return np.full(shape, values.a, dtype=np.float32)
    count = int(np.prod(shape))
    generator = np.random.PCG64(np.random.SeedSequence([seed, _STREAMS[name]]))
    words = np.asarray(generator.random_raw(count), dtype=np.uint64).reshape(-1, shape[-1])
    return _values(values, words).reshape(shape).astype(np.float32)


def _values(values: Values, words: NDArray[np.uint64]) -> NDArray[np.float64]:
    a, b = float(values.a), float(values.b)
    if values.kind == "uniform":
        return a + (b - a) * ((words >> np.uint64(40)).astype(np.float64) * 2.0**-24)
    if values.kind == "sign":
        return np.where(words >> np.uint64(63) == 1, a, -a)
    if values.kind == "row_sign":
        return np.broadcast_to(np.where(words[:, :1] >> np.uint64(63) == 1, a, -a), words.shape)
    normal = _normal(words)
    if values.kind == "affine":
        return a + b * normal
    if values.kind == "row_scale":
        cycle = np.asarray(values.cycle, dtype=np.float64)
        return normal * cycle[np.arange(len(normal)) % len(cycle)][:, None]
    normal = normal * a
    if values.kind == "zero_rows":
        normal[:: int(b)] = 0.0
    return normal


def _normal(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Mean 0, variance 1, range +-3.46: the sum of a word's four 16-bit fields (Irwin-Hall)."""
    fields = sum((words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
    centred = np.asarray(fields).astype(np.int64) - 131070
    return centred.astype(np.float64) * (1.0 / (65536.0 * (1.0 / 3.0) ** 0.5))
