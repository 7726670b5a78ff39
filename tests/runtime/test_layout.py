"""Whether two strided tensors share bytes, against counting them."""

import itertools
import random

from flashkda.layout import Layout, make_layout, share_bytes


def touched(layout: Layout, address: int) -> set[int]:
    steps = [[index * stride for index in range(size)] for size, stride in layout.dims]
    return {address + sum(offset) + byte for offset in itertools.product(*steps) for byte in range(layout.row)}


def test_slices_of_a_fused_projection_share_nothing() -> None:
    rows = make_layout((2, 5, 3), (5 * 3 * 512, 3 * 512, 512), 2, 128)
    assert rows.distinct
    for one, other in itertools.permutations(range(4), 2):
        assert not share_bytes(rows, one * 256, rows, other * 256)


def test_neighbouring_rows_count_as_shared_only_when_bytes_meet() -> None:
    rows = make_layout((4,), (128,), 2, 128)
    assert not share_bytes(rows, 0, rows, 4 * 256)
    assert share_bytes(rows, 0, rows, 4 * 256 - 2)
    assert share_bytes(rows, 512, rows, 0)


def test_random_nested_layouts_agree_with_counting() -> None:
    random.seed(7)
    outcomes = set()
    for _ in range(2000):
        row = random.choice([2, 4, 8])
        sizes, strides, inner = [], [], row
        for _ in range(random.randint(0, 3)):
            size = random.randint(1, 3)
            stride = inner + 2 * random.randint(0, 6)
            sizes.append(size)
            strides.append(stride // 2)
            inner = (size - 1) * stride + inner
        layout = make_layout(tuple(sizes), tuple(strides), 2, row // 2)
        assert layout.distinct
        address = 2 * random.randint(-30, 30)
        meets = bool(touched(layout, 0) & touched(layout, address))
        assert share_bytes(layout, 0, layout, address) == meets
        outcomes.add(meets)
    assert outcomes == {True, False}


def test_different_layouts_share_whenever_their_ranges_do() -> None:
    first, second = make_layout((4,), (64,), 2, 8), make_layout((4,), (32,), 2, 8)
    assert share_bytes(first, 0, second, 16)
    assert not share_bytes(first, 0, second, first.extent)


def test_overlapping_rows_are_not_distinct() -> None:
    assert not make_layout((2, 4), (0, 128), 2, 128).distinct
    assert not make_layout((2, 4), (256, 128), 2, 128).distinct
    assert make_layout((1, 4), (0, 128), 2, 128).distinct


def test_empty_tensors_share_nothing() -> None:
    empty = make_layout((0, 4), (8, 2), 2, 2)
    assert not share_bytes(empty, 0, empty, 0)
