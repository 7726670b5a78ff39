"""A spread of small calls for compute-sanitizer, which needs a process of its own and no caching allocator:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python sanitizer_spread.py

and the same with racecheck and synccheck; with initcheck and the argument `--well-formed`, which leaves out wrong
cu_seqlens: they let a sequence read records that no tile's owner wrote (in bounds; its result is documented as
unspecified). Without the allocator's cache every tensor is an allocation of its own, so that an access past it is seen.
Outputs are not prefilled, so that initcheck sees a read of what was never written. Exits with 1 if two BV differ.
"""

from __future__ import annotations

import os
import sys

import torch
from calls import STATE_DTYPES, Shape, make_tensors

import flashkda
from flashkda.artifacts import installed
from flashkda.goldens.cases import HEAD_DIM
from flashkda.goldens.run import same_bits
from flashkda.kernels import device_kernels

SHAPES = (
    Shape(T=1, H=1, initial="none", final="none"),
    Shape(T=16, H=2),
    Shape(T=17, H=1, B=3, initial="fp32", final="bf16"),
    Shape(T=150, H=3, initial="none", final="fp32", fused=True),
    Shape(T=100, H=2, cu_seqlens=(3, 20, 20, 61, 90), initial="bf16", final="fp32", pooled=True),
    Shape(T=64, H=5, cu_seqlens=(0, 0, 64), cu_dtype=torch.int32, initial="fp32", final="none", fused=True),
    Shape(T=0, H=2, B=2),
    Shape(T=40, H=2, cu_seqlens=(0, 0, 0)),
    Shape(T=60, H=1, cu_seqlens=tuple(range(0, 61, 1)), final="fp32"),
    Shape(T=300, H=2, in_place=True),
)
WRONG_CU_SEQLENS = ((0, 60, 20, 90), (-30, 10, 40, 90), (0, 40, 90, 5000), (90, 60, 30, 0), (2**40, -(2**40), 7, 9))


def run(shape: Shape, tensors, bv: int | None):
    """One call with memory of exactly the sizes it needs."""
    q = tensors["q"]
    number = len(shape.sequences)
    record = installed().manifest.contract.record
    workspace = torch.empty(shape.H * shape.tiles * record.bytes, dtype=torch.uint8, device=q.device)
    out = torch.empty(shape.B, shape.T, shape.H, HEAD_DIM, dtype=torch.bfloat16, device=q.device)
    initial, final = tensors["initial_state"], None
    if shape.in_place:
        initial = final = initial.clone()
    elif shape.final != "none":
        final = torch.empty(number, shape.H, HEAD_DIM, HEAD_DIM, dtype=STATE_DTYPES[shape.final], device=q.device)
    flashkda.fwd(
        q, tensors["k"], tensors["v"], tensors["g"], tensors["beta"], shape.scale, out, tensors["A_log"],
        tensors["dt_bias"], shape.lower_bound, initial_state=initial, final_state=final,
        cu_seqlens=tensors["cu_seqlens"], workspace=workspace, bv=bv,
    )  # fmt: skip
    torch.cuda.synchronize(q.device)
    return out, final


def main() -> int:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        print("set PYTORCH_NO_CUDA_MEMORY_CACHING=1, or accesses past a tensor stay hidden in the allocator's blocks")
        return 2
    device = torch.device("cuda", 0)
    variants = tuple(device_kernels(0).variants.recurrence)
    wrong = 0
    for shape in SHAPES:
        tensors = make_tensors(shape, device)
        out, final = run(shape, tensors, None)
        owned = [row for start, end in shape.sequences for row in range(start, end)]
        for bv in variants:
            other_out, other_final = run(shape, tensors, bv)
            rows = (x.view(-1, shape.H, HEAD_DIM)[owned] for x in (out, other_out))
            same = same_bits(*rows) and (final is None or same_bits(final, other_final))
            wrong += not same
            print(f"{shape} bv={bv}: {'ok' if same else 'DIFFERS'}", flush=True)
    shape = Shape(T=90, H=2, cu_seqlens=(0, 30, 61, 90), seed=9)
    tensors = make_tensors(shape, device)
    for cu_seqlens in () if "--well-formed" in sys.argv[1:] else WRONG_CU_SEQLENS:
        tensors["cu_seqlens"] = torch.tensor(cu_seqlens, device=device)
        for bv in variants:
            run(shape, tensors, bv)
            print(f"cu_seqlens {cu_seqlens} bv={bv}: returned", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
