"""Comparing tensors by their bits."""

import torch
from torch import Tensor

#: Integers by element size.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit (NaN equals itself, +0 is not -0)."""
    dtype = INTEGERS[a.element_size()]
    return a.dtype == b.dtype and bool(torch.equal(a.contiguous().view(dtype), b.contiguous().view(dtype)))
