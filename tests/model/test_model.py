"""The exact model against the recorded goldens, bit for bit."""

from __future__ import annotations

import numpy as np
import prepare
import pytest
import recorded
import recurrence
from rounding import (
    BF16,
    FP16,
    FP32,
    bf,
    fma_ftz,
    from_bf16_bits,
    from_fp32_bits,
    hf,
    nearest,
    to_bf16_bits,
    to_fp32_bits,
    toward_zero,
)
from tensor_core import matmul_bf16, matmul_fp16

from flashkda.goldens.inputs import make_inputs

TANH_ERROR = 2.0**-11  # of tanh.approx, relative


@pytest.mark.parametrize("name", recorded.NAMES)
def test_recurrence_returns_the_recorded_bits(name: str) -> None:
    for run in recorded.runs(name):
        out, state = recurrence.recurrence(run.record, run.v, run.beta, run.initial_state)
        np.testing.assert_array_equal(to_bf16_bits(out), run.out)
        if run.final_state is not None:
            stored = to_fp32_bits(state) if run.final_state.dtype == np.uint32 else to_bf16_bits(state)
            np.testing.assert_array_equal(stored, run.final_state)


def test_prepare_returns_the_recorded_bits_from_k_decayed_on() -> None:
    count = 0
    for label, tile in recorded.tiles_with_known_k_inverse():
        restored = prepare.k_restored(tile.k_inverse, tile.g_total)
        mqk = prepare.mqk(tile.q_decayed, tile.k_inverse)
        inverse = prepare.inverse(tile.k_decayed, tile.k_inverse, tile.beta)
        np.testing.assert_array_equal(to_bf16_bits(restored), tile.k_restored, err_msg=label)
        np.testing.assert_array_equal(to_bf16_bits(mqk), tile.mqk, err_msg=label)
        np.testing.assert_array_equal(to_bf16_bits(inverse), tile.inv, err_msg=label)
        count += 1
    assert count == 38


@pytest.mark.parametrize("name", recorded.NAMES)
def test_stored_sigmoids_are_those_of_beta(name: str) -> None:
    case, arrays = recorded.load(name)
    logits = from_bf16_bits(make_inputs(case)["beta"].reshape(-1, case.H))
    exact = 1 / (1 + np.exp(-logits))
    values = {"sigmoid_bf16": (from_bf16_bits(arrays["sigmoid_bf16"]), BF16)}
    if "sigmoid_fp16" in arrays:
        values["sigmoid_fp16"] = (arrays["sigmoid_fp16"].view(np.float16).astype(np.float64), FP16)
    for stored, form in values.values():
        allowed = TANH_ERROR / 2 + exact * 2.0 ** -(form.fraction + 1)
        for start, end in case.sequences:
            assert (np.abs(stored - exact) <= allowed)[start:end].all()


def test_rounding_to_bf16_is_nearest_even_with_subnormals_and_overflow() -> None:
    ulp = 2.0**-7
    tiny = 2.0**-133
    values = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 1e-9, tiny / 2, 1.5 * tiny, 3.4e38, -3.4e38, -0.0])
    expected = np.array([1, 1 + 2 * ulp, 1 + ulp, 0, 2 * tiny, np.inf, -np.inf, -0.0])
    np.testing.assert_array_equal(bf(values), expected)
    assert np.signbit(bf(np.array([-0.0])))[0]


def test_rounding_agrees_with_numpys_own_formats() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(4096) * 2.0 ** generator.integers(-30, 20, 4096)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(hf(values), values.astype(np.float16).astype(np.float64))
    np.testing.assert_array_equal(nearest(values, FP32), values.astype(np.float32).astype(np.float64))
    assert (np.abs(toward_zero(values, FP32)) <= np.abs(values)).all()


def test_fused_multiply_add_rounds_once() -> None:
    # The exact sum lies 2^-70 below a tie of fp32; float64 would round it onto the tie, and then up to even.
    a, b = np.array([2.0**-24 * (1 + 2.0**-23)]), np.array([1 - 2.0**-23])
    odd = np.array([1 + 2.0**-23])
    assert nearest(a * b + odd, FP32)[0] == 1 + 2.0**-22
    assert fma_ftz(a, b, odd)[0] == odd[0]


def test_fused_multiply_add_flushes_subnormals() -> None:
    one, subnormal, least = np.array([1.0]), np.array([-(2.0**-127)]), np.array([2.0**-126])
    assert fma_ftz(one, subnormal, least)[0] == least[0]
    flushed = fma_ftz(least, np.array([-0.5]), np.array([-0.0]))[0]
    assert flushed == 0 and np.signbit(flushed)


def test_one_block_truncates_every_term_to_the_largest_exponent() -> None:
    a, b = np.zeros((1, 16)), np.ones((16, 1))
    a[0, 0] = 1.0
    a[0, 1] = 2.0**-25
    a[0, 2] = 2.0**-26 * 1.5  # below 2^-25: gone
    np.testing.assert_array_equal(matmul_bf16(a, b), [[1.0]])
    a[0, 3:6] = 2.0**-25
    # Four kept quarters of an fp32 ulp: two of them make 2^-24, still cut, four make 2^-23.
    np.testing.assert_array_equal(matmul_bf16(a, b), [[1 + 2.0**-23]])


def test_a_products_exponent_is_not_renormalised() -> None:
    a, b = np.zeros((1, 16)), np.zeros((16, 1))
    a[0, 0] = b[0, 0] = 1.5  # 2.25, exponent 0 and not 1
    a[0, 1], b[1, 0] = 2.0**-25, 1.0
    a[0, 2:9], b[2:9, 0] = 2.0**-25, 1.0
    np.testing.assert_array_equal(matmul_bf16(a, b), [[2.25 + 2.0**-22]])


def test_order_inside_a_block_is_free_but_blocks_are_not() -> None:
    generator = np.random.default_rng(1)
    spread = 2.0 ** generator.integers(-20, 20, (16, 32))
    a = bf(generator.standard_normal((16, 32)) * spread)
    b = bf(generator.standard_normal((32, 64)))
    whole = matmul_bf16(a, b)
    inside = np.concatenate([generator.permutation(16), 16 + generator.permutation(16)])
    across = generator.permutation(32)
    np.testing.assert_array_equal(matmul_bf16(a[:, inside], b[inside]), whole)
    np.testing.assert_array_equal(matmul_bf16(b.T, a.T).T, whole)
    assert (matmul_bf16(a[:, across], b[across]) != whole).any()


def test_half_precision_accumulation_rounds_once_to_nearest() -> None:
    a, b = np.zeros((1, 16)), np.ones((16, 1))
    a[0, 0], a[0, 1], a[0, 2] = 1.0, 2.0**-11, 2.0**-24  # just above a tie of fp16; fp32 first would still see it
    np.testing.assert_array_equal(matmul_fp16(a, b), [[1 + 2.0**-10]])
    a[0, 2] = 0.0
    np.testing.assert_array_equal(matmul_fp16(a, b), [[1.0]])


def test_a_sum_that_vanishes_is_positive_zero() -> None:
    a, b = np.zeros((1, 16)), np.zeros((16, 1))
    a[0, 0], b[0, 0] = -(2.0**-133), 2.0**-133
    assert not np.signbit(matmul_bf16(a, b))[0, 0]


def test_state_is_rounded_to_bf16_even_without_a_token() -> None:
    empty = recurrence.Record(*(np.zeros((0, 1)) for _ in range(6)))
    state = np.full((128, 128), 1.0 + 2.0**-10)
    out, final = recurrence.recurrence(empty, np.zeros((0, 128)), np.zeros(0), state)
    assert out.shape == (0, 128)
    np.testing.assert_array_equal(final, 1.0)
    assert from_fp32_bits(to_fp32_bits(final))[0, 0] == 1.0
