"""Everything that is measured on one shape: our kernels, alone and together, at each BV, and the peers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashkda.api import fwd
from flashkda.arguments import ALL_TENSORS, check
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
    plans = _plans(sets, kernels, choices)
    # A whole call must not leave records of another order where a recurrence alone reads its own.
    workspaces = {bv: [one.workspace_for(_record_order(kernels, plan)) for one in sets] for bv, plan in plans.items()}
    for bv, plan in plans.items():
        variants.append(Variant(OURS, "both", bv, plan.bv, _together(sets, workspaces[bv], bv)))
    if checkpoint_every is not None:
        writing = _with_checkpoints(sets, workspaces[None], checkpoint_every)
        variants.append(Variant(OURS, "both", None, plans[None].bv, writing, checkpoint_every))
    return variants


def lone_variants(
    sets: Sequence[Inputs], kernels: DeviceKernels, choices: Sequence[int | None], checkpoint_every: int | None = None
) -> list[Variant]:
    """Prepare, and recurrence at each of the BVs, None for the automatic one; kernels are loaded.

    Prepare is that of the first BV. Each recurrence reads records of its own order, which are made here.
    checkpoint_every: for sets of one sequence, each recurrence once more, with bf16 checkpoints that many tokens apart.
    """
    plans = _plans(sets, kernels, choices)
    loaded = kernels.ready(kernels.variants.artifacts(), None)
    prepares: dict[str, Callable[[int], None]] = {}
    for plan in plans.values():
        order = _record_order(kernels, plan)
        if order not in prepares:
            prepares[order] = _alone(plan.prepare, PREPARE_POINTERS, sets, loaded)
            for index in range(len(sets)):
                prepares[order](index)
    # They are read on another stream.
    torch.cuda.synchronize()
    variants = [Variant(OURS, "prepare", None, None, next(iter(prepares.values())))]
    for bv, plan in plans.items():
        alone = _alone(plan.recurrence, RECURRENCE_POINTERS, sets, loaded)
        variants.append(Variant(OURS, "recurrence", bv, plan.bv, alone))
    if checkpoint_every is not None:
        written = _checkpoints(sets, checkpoint_every)
        for bv, plan in _plans(sets, kernels, choices, written[0], checkpoint_every).items():
            alone = _alone(plan.recurrence, RECURRENCE_POINTERS, sets, loaded, written)
            variants.append(Variant(OURS, "recurrence", bv, plan.bv, alone, checkpoint_every))
    return variants


def peer_variants(sets: Sequence[Inputs], peer: Peer) -> list[Variant]:
    """A peer's whole call, and its kernels one by one where it offers them."""
    runs = {"both": peer.prepare_calls(sets), **peer.prepare_kernels(sets)}
    return [Variant(peer.name, kernel, None, None, run) for kernel, run in runs.items()]


def _plans(
    sets: Sequence[Inputs],
    kernels: DeviceKernels,
    choices: Sequence[int | None],
    checkpoints: Tensor | None = None,
    checkpoint_every: int | None = None,
) -> dict[int | None, Plan]:
    contract = kernels.manifest.contract
    given = {name: getattr(sets[0], name, None) for name in ALL_TENSORS} | {"checkpoints": checkpoints}
    plans = {}
    for bv in choices:
        checked = check(contract, list(given.values()), sets[0].scale, LOWER_BOUND, bv, checkpoint_every)
        plans[bv] = make_plan(checked.problem, contract, kernels.variants, kernels.facts.sm_count)
    return plans


def _record_order(kernels: DeviceKernels, plan: Plan) -> str:
    return kernels.variants.recurrence[plan.bv].record_order


def _alone(
    launch: Launch | None,
    names: tuple[str, ...],
    sets: Sequence[Inputs],
    loaded: dict[str, Kernel],
    checkpoints: Sequence[Tensor] = (),
) -> Callable[[int], None]:
    assert launch is not None, "every benchmarked shape has tokens, heads and sequences"
    kernel, grid, parameters = loaded[launch.artifact.file], launch.grid, launch.parameters
    ordinal = sets[0].q.device.index
    given = []  # the tensors, not their addresses: nothing else holds the checkpoints
    for index, inputs in enumerate(sets):
        # No pools are measured here.
        tensors = {name: getattr(inputs, name, None) for name in names}
        tensors["workspace"] = inputs.workspace_for(launch.artifact.record_order)
        if checkpoints:
            tensors["checkpoints"] = checkpoints[index]
        given.append(tuple(tensors.values()))

    def run(index: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(ordinal) or LEGACY_STREAM
        pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in given[index])
        kernel.launch(grid, stream, parameters, pointers)

    return run


def _together(sets: Sequence[Inputs], workspaces: Sequence[Tensor], bv: int | None) -> Callable[[int], None]:
    def run(index: int) -> None:
        one = sets[index]
        fwd(
            one.q, one.k, one.v, one.g, one.beta, one.scale, one.out, one.A_log, one.dt_bias, LOWER_BOUND,
            initial_state=one.initial_state, final_state=one.final_state, cu_seqlens=one.cu_seqlens,
            workspace=workspaces[index], bv=bv,
        )  # fmt: skip

    return run


def _checkpoints(sets: Sequence[Inputs], every: int) -> list[Tensor]:
    _, tokens, heads, dim = sets[0].q.shape
    rows = (-(-tokens // every), heads, dim, dim)
    return [torch.empty(rows, dtype=torch.bfloat16, device=one.q.device) for one in sets]


def _with_checkpoints(sets: Sequence[Inputs], workspaces: Sequence[Tensor], every: int) -> Callable[[int], None]:
    written = _checkpoints(sets, every)

    def run(index: int) -> None:
        one = sets[index]
        fwd(
            one.q, one.k, one.v, one.g, one.beta, one.scale, one.out, one.A_log, one.dt_bias, LOWER_BOUND,
            initial_state=one.initial_state, final_state=one.final_state, workspace=workspaces[index],
            checkpoints=written[index], checkpoint_every=every,
        )  # fmt: skip

    return run
