"""A spread of small calls for compute-sanitizer, which needs a process of its own and no caching allocator:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python sanitizer_spread.py

and the same with racecheck and synccheck; with initcheck and the argument `--well-formed`, which leaves out wrong
cu_seqlens: they let a sequence read records that no tile's owner wrote (in bounds; its result is documented as
unspecified). Without the allocator's cache every tensor is an allocation of its own, so that an access past it is seen.
Outputs, and slots that no sequence resumes from, are not prefilled, so that initcheck sees a read of what was never
written. Exits with 1 if two BV differ, or two ways to make the same call: `flashkda.prefill`, the torch operator, a
replayed graph, two threads. test_sanitizers.py runs it under all four tools.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace

import torch
from calls import NAMES, STATE_DTYPES, Shape, arguments, make_tensors
from state_calls import StateCall, make

import flashkda
from flashkda.artifacts import installed
from flashkda.bits import same_bits
from flashkda.driver import get_driver
from flashkda.goldens.cases import HEAD_DIM
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
_PACKED = Shape(T=100, H=2, cu_seqlens=(3, 20, 20, 61, 90), initial="fp32", final="bf16")
STATE_CALLS = (
    StateCall(_PACKED, state_indices=(4, 0, 2, 5), slots=(6, 7), gap=8),
    StateCall(
        Shape(T=33, H=1, B=4, in_place=True), state_indices=(2, -1, 3, 9), index_dtype=torch.int64, slots=(4, 4),
        has_initial_state=(False, True, True, True),
    ),
    StateCall(_PACKED, has_initial_state=(True, False, True, False)),
    StateCall(_PACKED, checkpoint_every=16, checkpoint_cu_starts=(0, 2, 2, 5, 7), capacity=6),
    StateCall(Shape(T=70, H=2, B=2, initial="none", final="none"), checkpoint_every=32, capacity=6),
    StateCall(
        Shape(T=100, H=1, cu_seqlens=(0, 40, 70, 100), initial="fp32", final="fp32", in_place=True),
        state_indices=(1, -1, 0), slots=(2, 2), has_initial_state=(True, True, False), checkpoint_every=16,
        checkpoint_dtype="fp32", checkpoint_cu_starts=(0, 3, 5, 7), starts_dtype=torch.int32, capacity=7,
    ),
)  # fmt: skip
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


def run_state_call(case: StateCall, device: torch.device, bv: int | None):
    """All that one call owes: out of its live sequences, their final slots, and the checkpoint rows, one after another.

    Nothing else is looked at, as nobody may have written it.
    """
    made = make(case, device, fill=None, guard=0)
    bytes_needed = case.shape.H * case.shape.tiles * installed().manifest.contract.record.bytes
    workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=device)
    flashkda.fwd(**made.arguments, workspace=workspace, bv=bv)
    torch.cuda.synchronize(device)
    out = made.arguments["out"].view(-1, case.shape.H, HEAD_DIM)
    owed = [out[start:end] for start, end in (case.shape.sequences[n] for n in case.live)]
    if "final_state" in made.pools:
        owed += [made.pools["final_state"].slots[slot] for slot in case.slots_of(case.live)]
    return owed + [made.pools["checkpoints"].slots[row] for _, _, row in case.checkpoint_rows]


def blank(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised results and a workspace, of exactly the sizes that the call needs."""
    size = len(shape.sequences), shape.H, HEAD_DIM, HEAD_DIM
    needed = shape.H * shape.tiles * installed().manifest.contract.record.bytes
    return {
        "out": torch.empty(shape.B, shape.T, shape.H, HEAD_DIM, dtype=torch.bfloat16, device=device),
        "final_state": torch.empty(size, dtype=STATE_DTYPES[shape.final], device=device),
        "workspace": torch.empty(needed, dtype=torch.uint8, device=device),
    }


def same_owned(shape: Shape, a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Equal (out, final_state), bit for bit, but for rows of no sequence."""
    owned = [row for start, end in shape.sequences for row in range(start, end)]
    rows = (out.view(-1, shape.H, HEAD_DIM)[owned] for out, _ in (a, b))
    return same_bits(*rows) and same_bits(a[1], b[1])


def other_ways(shape: Shape, tensors, bv: int) -> dict[str, bool]:
    """Whether results of the functional form, with a workspace of its own, and of the operator are those of `fwd`."""
    from flashkda.torch_operator import fwd as operator

    device = tensors["q"].device
    first = run(shape, tensors, bv)
    functional = flashkda.prefill(**arguments(shape, tensors), output_final_state=True, bv=bv)
    given = blank(shape, device)
    operator(**arguments(shape, tensors, **given), bv=bv)
    torch.cuda.synchronize(device)
    return {
        "prefill": same_owned(shape, functional, first),
        "operator": same_owned(shape, (given["out"], given["final_state"]), first),
    }


def replayed(shapes: tuple[Shape, ...], tensors: tuple, bv: int) -> bool:
    """Whether a graph of the first call, replayed with the contents of each, does as each call does."""
    driver, device = get_driver(), tensors[0]["q"].device
    wanted = [run(shape, given, bv) for shape, given in zip(shapes, tensors, strict=True)]
    static = {name: tensors[0][name].clone() for name in NAMES}
    given = blank(shapes[0], device)
    stream = torch.cuda.Stream(device)
    handle = driver.bindings.CUstream(stream.cuda_stream)
    torch.cuda.synchronize(device)
    # Not torch's own graph, which keeps a pool of the allocator that is switched off here.
    with torch.cuda.stream(stream):
        driver.call(
            "cuStreamBeginCapture", handle, driver.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        )
        flashkda.fwd(**arguments(shapes[0], static, **given), bv=bv)
        graph = driver.call("cuStreamEndCapture", handle)
    executable = driver.call("cuGraphInstantiate", graph, 0)
    same = True
    for shape, contents, results in zip(shapes, tensors, wanted, strict=True):
        for name in NAMES:
            static[name].copy_(contents[name])
        torch.cuda.synchronize(device)
        driver.call("cuGraphLaunch", executable, handle)
        stream.synchronize()
        same = same and same_owned(shape, (given["out"], given["final_state"]), results)
    driver.call("cuGraphExecDestroy", executable)
    driver.call("cuGraphDestroy", graph)
    return same


def in_two_threads(shapes: tuple[Shape, Shape], device: torch.device, bvs: tuple[int, ...]) -> bool:
    """Whether calls of two threads, on a stream and with a workspace each, do as they do alone."""
    tensors = [make_tensors(shape, device) for shape in shapes]
    wanted = [run(shape, given, None) for shape, given in zip(shapes, tensors, strict=True)]
    results = [[blank(shape, device) for _ in bvs] for shape in shapes]
    for runs in results:
        for given in runs:
            given["workspace"] = runs[0]["workspace"]
    torch.cuda.synchronize(device)
    start, done = threading.Barrier(2), []

    def serve(index: int) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            start.wait(60)
            for bv, given in zip(bvs, results[index], strict=True):
                flashkda.fwd(**arguments(shapes[index], tensors[index], **given), bv=bv)
        stream.synchronize()
        done.append(index)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A thread that raised has printed why.
    return sorted(done) == [0, 1] and all(
        same_owned(shapes[index], (given["out"], given["final_state"]), wanted[index])
        for index in range(2)
        for given in results[index]
    )


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
    for number, case in enumerate(STATE_CALLS):
        first = run_state_call(case, device, None)
        for bv in variants:
            same = all(map(same_bits, first, run_state_call(case, device, bv)))
            wrong += not same
            print(f"state call {number} bv={bv}: {'ok' if same else 'DIFFERS'}", flush=True)
    # fp32, which is what prefill returns.
    packed = replace(_PACKED, final="fp32")
    changed = replace(packed, cu_seqlens=(0, 40, 41, 80, 100), seed=1)
    contents = make_tensors(packed, device), make_tensors(changed, device)
    for bv in variants:
        checks = other_ways(packed, contents[0], bv) | {"graph": replayed((packed, changed), contents, bv)}
        for what, same in checks.items():
            wrong += not same
            print(f"{what} bv={bv}: {'ok' if same else 'DIFFERS'}", flush=True)
    same = in_two_threads((packed, Shape(T=70, H=3, final="fp32", seed=2)), device, variants)
    wrong += not same
    print(f"two threads: {'ok' if same else 'DIFFERS'}", flush=True)
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
