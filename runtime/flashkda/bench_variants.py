"""Everything that is measured on one shape: our kernels, alone and together, at each BV, and the peers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashkda.api import fwd
from flashkda.arguments import TENSORS, check
from flashkda.bench_inputs import LOWER_BOUND, Inputs
from flashkda.bench_peers import OURS, Peer
from flashkda.driver import LEGACY_STREAM, Kernel
from flashkda.kernels import DeviceKernels
from flashkda.planner import PREPARE_POINTERS, RECURRENCE_POINTERS, Launch, Plan, make_plan


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to time.

    by: whose it is; kernel: "prepare", "recurrence" or "both"; bv: the one asked for, None for the automatic choice or
    where there is none; bv_used: the one it comes to; run: launches call i, on tensor set i, on the current stream;
    checkpoint_every: tokens between the checkpoints that are written too, None without.
    """

    by: str
    kernel: str
    bv: int | None
    bv_used: int | None
    run: Callable[[int], None]
    checkpoint_every: int | None = None


def own_variants(sets: Sequence[Inputs], kernels: DeviceKernels, checkpoint_every: int | None) -> list[Variant]:
    """Prepare, and recurrence and both at the automatic BV and at every BV the device has; kernels are loaded.

    checkpoint_every: for sets of one sequence, tokens between checkpoints of one more variant, both at the automatic BV
    with bf16 checkpoints; None without.
    """
    choices = (None, *kernels.variants.recurrence)
    variants = lone_variants(sets, kernels, choices)
    used = {one.bv: one.bv_used for one in variants if one.kernel == "recurrence"}
    variants += [Variant(OURS, "both", bv, used[bv], _together(sets, bv)) for bv in choices]
    if checkpoint_every is not None:
        writing = _with_checkpoints(sets, checkpoint_every)
        variants.append(Variant(OURS, "both", None, used[None], writing, checkpoint_every))
    return variants


def lone_variants(sets: Sequence[Inputs], kernels: DeviceKernels, choices: Sequence[int | None]) -> list[Variant]:
    """Prepare, and recurrence at each of the BVs, None for the automatic one; kernels are loaded."""
    plans = {bv: _plan(sets[0], kernels, bv) for bv in choices}
    loaded = kernels.ready((kernels.variants.prepare, *kernels.variants.recurrence.values()), None)
    prepare = next(iter(plans.values())).prepare
    variants = [Variant(OURS, "prepare", None, None, _alone(prepare, PREPARE_POINTERS, sets, loaded))]
    for bv, plan in plans.items():
        alone = _alone(plan.recurrence, RECURRENCE_POINTERS, sets, loaded)
        variants.append(Variant(OURS, "recurrence", bv, plan.bv, alone))
    return variants


def peer_variants(sets: Sequence[Inputs], peer: Peer) -> list[Variant]:
    """A peer's whole call, and its kernels one by one where it offers them."""
    runs = {"both": peer.prepare_calls(sets), **peer.prepare_kernels(sets)}
    return [Variant(peer.name, kernel, None, None, run) for kernel, run in runs.items()]


def _plan(inputs: Inputs, kernels: DeviceKernels, bv: int | None) -> Plan:
    contract = kernels.manifest.contract
    tensors = [getattr(inputs, name) for name in TENSORS]
    checked = check(contract, tensors, inputs.scale, LOWER_BOUND, bv)
    return make_plan(checked.problem, contract, kernels.variants, kernels.facts.sm_count)


def _alone(
    launch: Launch | None, names: tuple[str, ...], sets: Sequence[Inputs], loaded: dict[str, Kernel]
) -> Callable[[int], None]:
    assert launch is not None, "every benchmarked shape has tokens, heads and sequences"
    kernel, grid, parameters = loaded[launch.artifact.file], launch.grid, launch.parameters
    ordinal = sets[0].q.device.index
    pointers = []
    for inputs in sets:
        # No pools and no checkpoints are measured here.
        tensors = [getattr(inputs, name, None) for name in names]
        pointers.append(tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors))

    def run(index: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(ordinal) or LEGACY_STREAM
        # Not overlapped with the launch in front: that would be the same kernel, on other tensors.
        kernel.launch(grid, stream, parameters, pointers[index], False)

    return run


def _together(sets: Sequence[Inputs], bv: int | None) -> Callable[[int], None]:
    def run(index: int) -> None:
        one = sets[index]
        fwd(
            one.q, one.k, one.v, one.g, one.beta, one.scale, one.out, one.A_log, one.dt_bias, LOWER_BOUND,
            initial_state=one.initial_state, final_state=one.final_state, cu_seqlens=one.cu_seqlens,
            workspace=one.workspace, bv=bv,
        )  # fmt: skip

    return run


def _with_checkpoints(sets: Sequence[Inputs], every: int) -> Callable[[int], None]:
    _, tokens, heads, dim = sets[0].q.shape
    rows = (-(-tokens // every), heads, dim, dim)
    written = [torch.empty(rows, dtype=torch.bfloat16, device=one.q.device) for one in sets]

    def run(index: int) -> None:
        one = sets[index]
        fwd(
            one.q, one.k, one.v, one.g, one.beta, one.scale, one.out, one.A_log, one.dt_bias, LOWER_BOUND,
            initial_state=one.initial_state, final_state=one.final_state, workspace=one.workspace,
            checkpoints=written[index], checkpoint_every=every,
        )  # fmt: skip

    return run
