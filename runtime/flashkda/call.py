"""One accepted call signature, ready to run: at each call only addresses are looked at before the launches.

Imported only once a tensor has come in.
"""

from collections.abc import Sequence

import torch

from flashkda.arguments import TENSORS, Checked, check, refuse_gradients
from flashkda.artifacts import installed
from flashkda.driver import LEGACY_STREAM, Kernel
from flashkda.errors import ArgumentError
from flashkda.kernels import DeviceKernels, device_kernels
from flashkda.layout import share_bytes
from flashkda.log import logger
from flashkda.planner import Launch, Plan, make_plan

_WRITTEN = tuple(map(TENSORS.index, ("out", "final_state", "workspace")))
_IN_PLACE = (TENSORS.index("final_state"), TENSORS.index("initial_state"))
# Pairs of positions in TENSORS, a written tensor and another one, that may not share memory; each pair once.
_EXCLUSIVE = tuple(
    (written, other)
    for order, written in enumerate(_WRITTEN)
    for other in range(len(TENSORS))
    if other not in _WRITTEN[: order + 1]
)


class Call:
    """A plan bound to a device and its loaded kernels; shared by all calls, and threads, of one signature."""

    def __init__(self, checked: Checked, plan: Plan, kernels: DeviceKernels) -> None:
        self._plan = plan
        self._device = checked.device
        self._ordinal = kernels.facts.ordinal
        self._context = kernels.context
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._grad_enabled = torch.is_grad_enabled
        launches = [launch for launch in (plan.prepare, plan.recurrence) if launch is not None]
        stream = self._current_stream(self._ordinal) or LEGACY_STREAM
        loaded = kernels.ready([launch.artifact for launch in launches], stream) if launches else {}
        self._prepare = _bind(plan.prepare, loaded)
        self._recurrence = _bind(plan.recurrence, loaded)
        self._alignments = checked.alignments
        self._layouts = checked.layouts
        # The addresses of the last accepted call: callers mostly come back with the same buffers.
        self._examined: list[int] = []

    def run(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch on the current stream of the tensors' device; `tensors` in the order of `TENSORS`.

        Raises `ArgumentError` for what the signature does not tell (gradients, alignment, overlap) and `DriverError`.
        """
        if self._grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    refuse_gradients(dict(zip(TENSORS, tensors, strict=True)))
        try:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        except RuntimeError:
            addresses = [0 if tensor is None else _address(tensor) for tensor in tensors]
        if addresses != self._examined:
            self._examine(addresses)
            self._examined = addresses
        if self._recurrence is None:
            return
        q, k, v, g, beta, out, a_log, dt_bias, initial, final, cu_seqlens, workspace = addresses
        if tensors[-1] is None and self._plan.workspace_bytes:
            # The allocator hands the memory on in stream order, so it may be given back before the kernels have run.
            scratch = torch.empty(self._plan.workspace_bytes, dtype=torch.uint8, device=self._device)
            workspace = scratch.data_ptr()
        stream = self._current_stream(self._ordinal) or LEGACY_STREAM
        entered = self._context.enter()
        try:
            if self._prepare is not None:
                kernel, launch = self._prepare
                pointers: tuple[int, ...] = (q, k, g, beta, a_log, dt_bias, cu_seqlens, workspace)
                kernel.launch(launch.grid, stream, launch.parameters, pointers, launch.overlap)
            kernel, launch = self._recurrence
            pointers = (v, out, workspace, initial, final, cu_seqlens)
            kernel.launch(launch.grid, stream, launch.parameters, pointers, launch.overlap)
        finally:
            if entered:
                self._context.leave()

    def _examine(self, addresses: list[int]) -> None:
        """Check what depends on addresses alone: alignment, and that nothing written is also read elsewhere."""
        layouts = self._layouts
        for index, alignment in enumerate(self._alignments):
            if not layouts[index].extent:
                continue
            name = TENSORS[index]
            if not addresses[index]:
                raise ArgumentError(
                    name, "a tensor without memory (a fake one, or one that torch.func wraps)",
                    "a tensor of CUDA memory", "trace through torch.compile, or use torch.ops.flashkda.fwd",
                )  # fmt: skip
            if addresses[index] % alignment:
                raise ArgumentError(
                    name,
                    f"at address {addresses[index]:#x}",
                    f"{alignment}-byte aligned",
                    f"copy it with {name}.clone()",
                )
        for written, other in _EXCLUSIVE:
            if not share_bytes(layouts[written], addresses[written], layouts[other], addresses[other]):
                continue
            allowed = "in memory of its own"
            if (written, other) == _IN_PLACE:
                # Equal layouts at one address: each CTA reads its own part of the state before it writes it.
                if addresses[written] == addresses[other] and layouts[written] == layouts[other]:
                    continue
                allowed = "initial_state itself or in memory of its own"
            name = TENSORS[written]
            raise ArgumentError(name, f"in the same memory as {TENSORS[other]}", allowed, "allocate it separately")


def make_call(tensors: Sequence[object], scale: object, lower_bound: object, bv: object) -> Call:
    """Check, plan and load for a signature. Raises every `FlashKDAError`."""
    checked = check(installed().manifest.contract, tensors, scale, lower_bound, bv)
    kernels = device_kernels(checked.device.index)
    plan = make_plan(checked.problem, kernels.manifest.contract, kernels.variants, kernels.facts.sm_count)
    if checked.workspace_bytes is not None and checked.workspace_bytes < plan.workspace_bytes:
        raise ArgumentError(
            "workspace", f"{checked.workspace_bytes} bytes", f"at least {plan.workspace_bytes} bytes for this call",
            "allocate flashkda.workspace_size(T_total, H, N) bytes",
        )  # fmt: skip
    logger.debug(
        "planned B=%d T=%d H=%d N=%d on device %d: BV %d, %d tiles, workspace %d bytes",
        checked.problem.batch, checked.problem.seqlen, checked.problem.heads, checked.problem.sequences,
        kernels.facts.ordinal, plan.bv, plan.total_tiles, plan.workspace_bytes,
    )  # fmt: skip
    return Call(checked, plan, kernels)


def _address(tensor: torch.Tensor) -> int:
    """0 for a wrapper without storage, as torch.func makes them."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _bind(launch: Launch | None, loaded: dict[str, Kernel]) -> tuple[Kernel, Launch] | None:
    return None if launch is None else (loaded[launch.artifact.file], launch)
