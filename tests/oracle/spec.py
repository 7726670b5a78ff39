"""Builds and calls spec.cu, a slow kernel pair written from the numeric contract alone: the reference for bits on GPUs.

    nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -cudart static -shared

It takes contiguous tensors, int64 cu_seqlens without out-of-range values, at least one token and one dtype for both
states, and it reads rows past a sequence's end as the tokens that follow, as the original does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashkda.goldens.cases import CHUNK, HEAD_DIM

SOURCE = Path(__file__).parent / "spec.cu"
_FIELDS = (
    ("k_decayed", 4096, torch.bfloat16, (CHUNK, HEAD_DIM)),
    ("q_decayed", 4096, torch.bfloat16, (CHUNK, HEAD_DIM)),
    ("k_restored", 4096, torch.bfloat16, (CHUNK, HEAD_DIM)),
    ("g_total", 512, torch.float32, (HEAD_DIM,)),
    ("inv", 512, torch.bfloat16, (CHUNK, CHUNK)),
    ("mqk", 512, torch.bfloat16, (CHUNK, CHUNK)),
)
_BYTES = sum(entry[1] for entry in _FIELDS)


def build(folder: Path, compute_capability: tuple[int, int]) -> Path:
    """Compile spec.cu into `folder`. Raises FileNotFoundError without nvcc, CalledProcessError if it fails."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc is neither on PATH nor in /usr/local/cuda/bin")
    major, minor = compute_capability
    suffix = "a" if major >= 9 else ""
    target = f"arch=compute_{major}{minor}{suffix},code=sm_{major}{minor}{suffix}"
    library = folder / "libspec.so"
    flags = [
        "-std=c++17",
        "-O3",
        "-ftz=true",
        "-gencode",
        target,
        "-Xcompiler",
        "-fPIC",
        "-cudart",
        "static",
        "-shared",
    ]
    subprocess.run([nvcc, *flags, "-o", str(library), str(SOURCE)], check=True, capture_output=True, text=True)
    return library


@dataclass(frozen=True)
class SpecResult:
    """out bf16 [B, T, H, 128]; final_state bf16 [N, H, V, K]; workspace arrays [H, tiles, ...] by record field name."""

    out: Tensor
    final_state: Tensor
    workspace: dict[str, Tensor]


class Spec:
    """The loaded oracle."""

    def __init__(self, library: Path) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._call = ctypes.CDLL(str(library)).spec_fwd
        self._call.argtypes = [
            *[pointer] * 6, ctypes.c_float, *[pointer] * 3, *[integer] * 3, *[pointer] * 3, ctypes.c_double, integer,
            integer, pointer,
        ]  # fmt: skip
        self._call.restype = integer

    def fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        out: Tensor,
    ) -> SpecResult:
        """Run on copies made contiguous; `out` (contiguous) is written where a sequence owns the token.

        The state is bf16 at heart, so it is always asked for as bf16; an fp32 initial state is rounded here, which is
        what the kernel does first.
        """
        batch, length, heads, _ = q.shape
        total = batch * length
        number = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        tiles = number * -(-length // CHUNK) if cu_seqlens is None else -(-total // CHUNK) + number
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        beta_t = beta.reshape(total, heads).t().contiguous()
        initial = None if initial_state is None else initial_state.to(torch.bfloat16).contiguous()
        cu = None if cu_seqlens is None else cu_seqlens.long()
        final = torch.empty(number, heads, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device=q.device)
        raw = torch.full((heads * tiles * _BYTES,), 0xAB, dtype=torch.uint8, device=q.device)

        def address(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        code = self._call(
            address(q), address(k), address(v), address(g), address(beta_t), address(initial), scale, address(final),
            address(out), address(raw), total, heads, number, address(cu), address(A_log.contiguous()),
            address(dt_bias.contiguous()), lower_bound, 0, 3, torch.cuda.current_stream(q.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"the oracle failed with CUDA error {code}")
        return SpecResult(out, final, _views(raw, heads, tiles))


def _views(raw: Tensor, heads: int, tiles: int) -> dict[str, Tensor]:
    views, offset = {}, 0
    for name, size, dtype, shape in _FIELDS:
        end = offset + heads * tiles * size
        views[name] = raw[offset:end].view(dtype).view(heads, tiles, *shape)
        offset = end
    return views
