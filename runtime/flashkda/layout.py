"""Where a tensor's bytes lie relative to its first one, and whether two tensors share any. Pure numbers."""

from typing import NamedTuple


class Layout(NamedTuple):
    """Contiguous rows repeated along strided dimensions.

    dims: (size, stride in bytes), only sizes above 1, strides descending; row: bytes of one row; extent: bytes from
    the first to past the last. An empty tensor is `EMPTY`.
    """

    dims: tuple[tuple[int, int], ...]
    row: int
    extent: int

    @property
    def distinct(self) -> bool:
        """No two rows share a byte (sufficient: each stride passes the whole extent of the smaller ones)."""
        inner = self.row
        for size, stride in reversed(self.dims):
            if stride < inner:
                return False
            inner += (size - 1) * stride
        return True


EMPTY = Layout((), 0, 0)


def make_layout(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int, row_items: int) -> Layout:
    """The layout of rows of `row_items` elements repeated `sizes` times at `strides` (elements)."""
    if 0 in sizes or row_items == 0:
        return EMPTY
    dims = [(size, stride * itemsize) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    dims.sort(key=lambda dim: -dim[1])
    row = row_items * itemsize
    return Layout(tuple(dims), row, row + sum((size - 1) * stride for size, stride in dims))


def share_bytes(first: Layout, first_address: int, second: Layout, second_address: int) -> bool:
    """Whether two tensors have a byte in common.

    Exact for disjoint ranges and for interleaved tensors of one layout (slices of a fused projection, slots of a state
    pool); otherwise overlapping ranges count as shared.
    """
    if not first.extent or not second.extent:
        return False
    delta = second_address - first_address
    if delta >= first.extent or -delta >= second.extent:
        return False
    if first == second and first.distinct:
        return _meets(delta, first.dims, first.row)
    return True


def _meets(delta: int, dims: tuple[tuple[int, int], ...], row: int) -> bool:
    """Whether some difference of row indices brings two rows `delta` bytes apart within one row of each other.

    Strides are nested, so the smaller dimensions add less than this stride: only the two nearest steps can work.
    """
    if not dims:
        return -row < delta < row
    (size, stride), rest = dims[0], dims[1:]
    step = delta // stride
    return any(
        abs(candidate) < size and _meets(delta - candidate * stride, rest, row) for candidate in (step, step + 1)
    )
