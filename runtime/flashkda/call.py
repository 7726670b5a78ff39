"""One accepted call signature, ready to run: at each call only addresses are looked at before the launches.

Imported only once a tensor has come in.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from flashkda.arguments import ALL_TENSORS, TENSORS_OF_POOLS, Checked, check, refuse_gradients
from flashkda.artifacts import installed
from flashkda.driver import LEGACY_STREAM, Kernel
from flashkda.errors import ArgumentError
from flashkda.kernels import DeviceKernels, device_kernels
from flashkda.layout import share_bytes
from flashkda.log import logger
from flashkda.planner import Launch, Plan, make_plan

_WRITTEN = tuple(map(ALL_TENSORS.index, ("out", "final_state", "workspace", "checkpoints")))
_INITIAL, _FINAL, _WORKSPACE = map(ALL_TENSORS.index, ("initial_state", "final_state", "workspace"))
_NO_POOLS = (0,) * len(TENSORS_OF_POOLS)
#: Sets of buffers that a call remembers at most, then it forgets them all: one for each of a model's layers.
KEPT_ADDRESSES = 64


class Guard(NamedTuple):
    """Tells in one C++ call whether tensors are as those of an earlier call in all that its signature holds.

    key: what the signature holds beside the tensors, among it which of them are absent; pick: those given, each once;
    holds: whether these have the same type, dtype, device, layout, shape, strides, requires_grad and lazy-view bits;
    free_of_gradients: none of them requires grad; types: kept alive, as torch compares their addresses.
    """

    key: tuple[object, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    holds: Callable[..., bool]
    free_of_gradients: bool
    types: tuple[type, ...]
    call: "Call"


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
        # Addresses that were accepted: callers mostly come back with the same buffers.
        self.examined: set[tuple[int, ...]] = set()
        self._guard: Guard | None = None

    def run(
        self,
        tensors: Sequence[torch.Tensor | None],
        addresses: tuple[int, ...] | None,
        free_of_gradients: bool = False,
        examined: bool = False,
    ) -> None:
        """Launch on the current stream of the tensors' device; `tensors` as `flashkda.api.run` has them.

        addresses: theirs, 0 for an absent one; None if one has none. examined: whether these are among `examined`.

        Raises `ArgumentError` for what the signature does not tell (gradients, unless it is known that no tensor
        requires them, memory, alignment, overlap) and `DriverError`.
        """
        if not free_of_gradients and self._grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    refuse_gradients(dict(zip(ALL_TENSORS, tensors, strict=False)))
        if addresses is None:
            addresses = tuple([0 if tensor is None else _address(tensor) for tensor in tensors])
        if not examined and addresses not in self.examined:
            self._examine(tensors, addresses)
            if len(self.examined) >= KEPT_ADDRESSES:
                self.examined.clear()
            self.examined.add(addresses)
        if self._recurrence is None:
            return
        q, k, v, g, beta, out, a_log, dt_bias, initial, final, cu_seqlens, workspace = addresses[:12]
        if tensors[_WORKSPACE] is None and self._plan.workspace_bytes:
            # The allocator hands the memory on in stream order, so it may be given back before the kernels have run.
            scratch = torch.empty(self._plan.workspace_bytes, dtype=torch.uint8, device=self._device)
            workspace = _address(scratch)
            if not workspace:
                raise ArgumentError(
                    "workspace", "None where torch allocates no memory (in a fake mode, or inside torch.func)",
                    "given there", "allocate it outside, or trace through torch.compile",
                )  # fmt: skip
        stream = self._current_stream(self._ordinal) or LEGACY_STREAM
        entered = self._context.enter()
        try:
            if self._prepare is not None:
                kernel, launch = self._prepare
                pointers: tuple[int, ...] = (q, k, g, beta, a_log, dt_bias, cu_seqlens, workspace)
                kernel.launch(launch.grid, stream, launch.parameters, pointers)
            kernel, launch = self._recurrence
            pointers = (v, out, workspace, initial, final, cu_seqlens) + (addresses[12:] or _NO_POOLS)
            kernel.launch(launch.grid, stream, launch.parameters, pointers)
        finally:
            if entered:
                self._context.leave()

    def renew_guard(
        self, key: tuple[object, ...], tensors: Sequence[torch.Tensor | None], failed: tuple[Guard, ...]
    ) -> Guard | None:
        """The guard of this call's signature, a new one if it is among those that `failed` on these tensors.

        A guard also fails in another mode (inference mode, say) than it was made in. None: there can be none.
        """
        if self._guard is None or any(guard is self._guard for guard in failed):
            self._guard = _make_guard(key, tensors, self)
        return self._guard

    def _examine(self, tensors: Sequence[torch.Tensor | None], addresses: tuple[int, ...]) -> None:
        """Check what depends on addresses: memory, alignment, and that nothing written is also read elsewhere."""
        given = []
        for index, address in enumerate(addresses):
            tensor, layout, alignment = tensors[index], self._layouts[index], self._alignments[index]
            if tensor is None or not layout.extent:
                continue
            # Torch adds a view's offset to the null pointer of a freed storage.
            if not _is_backed(tensor, layout.extent):
                raise ArgumentError(
                    ALL_TENSORS[index], "a tensor whose storage was freed or cut", "a tensor of CUDA memory",
                    "gather or allocate it before the call",
                )  # fmt: skip
            if not address:
                raise ArgumentError(
                    ALL_TENSORS[index], "a tensor without memory (a fake one, or one that torch.func wraps)",
                    "a tensor of CUDA memory", "trace through torch.compile, or use torch.ops.flashkda.fwd",
                )  # fmt: skip
            if address % alignment:
                name = ALL_TENSORS[index]
                raise ArgumentError(
                    name, f"at address {address:#x}", f"{alignment}-byte aligned", f"copy it with {name}.clone()"
                )
            given.append((index, address, address + layout.extent))
        for order, written in enumerate(_WRITTEN):
            if written >= len(addresses) or not self._layouts[written].extent:
                continue
            begin, end = addresses[written], addresses[written] + self._layouts[written].extent
            for other, its_begin, its_end in given:
                # Each pair once.
                if its_begin < end and begin < its_end and other not in _WRITTEN[: order + 1]:
                    self._require_disjoint(written, begin, other, its_begin)

    def _require_disjoint(self, written: int, address: int, other: int, its_address: int) -> None:
        layout, its_layout = self._layouts[written], self._layouts[other]
        if not share_bytes(layout, address, its_layout, its_address):
            return
        allowed = "in memory of its own"
        if (written, other) == (_FINAL, _INITIAL):
            # Equal layouts at one address: each CTA reads its own part of the state before it writes it.
            if address == its_address and layout == its_layout:
                return
            allowed = "initial_state itself or in memory of its own"
        name = ALL_TENSORS[written]
        raise ArgumentError(name, f"in the same memory as {ALL_TENSORS[other]}", allowed, "allocate it separately")


def make_call(
    tensors: Sequence[object], scale: object, lower_bound: object, bv: object, checkpoint_every: object
) -> Call:
    """Check, plan and load for a signature. Raises every `FlashKDAError`."""
    checked, kernels, plan = _plan(tensors, scale, lower_bound, bv, checkpoint_every)
    if checked.workspace_bytes is not None and checked.workspace_bytes < plan.workspace_bytes:
        raise ArgumentError(
            "workspace", f"{checked.workspace_bytes} bytes", f"at least {plan.workspace_bytes} bytes for this call",
            "allocate flashkda.workspace_size(T_total, H, N) bytes",
        )  # fmt: skip
    call = Call(checked, plan, kernels)
    # Not before: one whose kernels cannot be loaded is planned again at each try.
    logger.debug(
        "planned B=%d T=%d H=%d N=%d on device %d: BV %d, %d tiles, workspace %d bytes",
        checked.problem.batch, checked.problem.seqlen, checked.problem.heads, checked.problem.sequences,
        kernels.facts.ordinal, plan.bv, plan.total_tiles, plan.workspace_bytes,
    )  # fmt: skip
    return call


def record_order(tensors: Sequence[object], scale: object, lower_bound: object, bv: object) -> str:
    """The order of the records that such a call leaves in its workspace. Raises every `FlashKDAError`."""
    _, kernels, plan = _plan(tensors, scale, lower_bound, bv, None)
    return kernels.variants.recurrence[plan.bv].record_order


def _plan(
    tensors: Sequence[object], scale: object, lower_bound: object, bv: object, checkpoint_every: object
) -> tuple[Checked, DeviceKernels, Plan]:
    checked = check(installed().manifest.contract, tensors, scale, lower_bound, bv, checkpoint_every)
    kernels = device_kernels(checked.device.index)
    plan = make_plan(checked.problem, kernels.manifest.contract, kernels.variants, kernels.facts.sm_count)
    return checked, kernels, plan


def _make_guard(key: tuple[object, ...], tensors: Sequence[torch.Tensor | None], call: Call) -> Guard | None:
    """None where torch's guards do not serve, or where a tensor is given twice (but for a state in place)."""
    if not guards_see_everything():
        return None
    given = [index for index, tensor in enumerate(tensors) if tensor is not None]
    if tensors[_INITIAL] is not None and tensors[_INITIAL] is tensors[_FINAL]:
        given.remove(_INITIAL)
    picked = [tensor for index in given if (tensor := tensors[index]) is not None]
    holds = _guard_tensors(picked)
    if not holds(*picked):
        return None
    requires_grad = any(tensor.requires_grad for tensor in picked)
    return Guard(key, itemgetter(*given), holds, not requires_grad, tuple(map(type, picked)), call)


def _guard_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Compares as many tensors, each of them another one, with these."""
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    holds: Callable[..., bool] = guards.check
    return holds


@lru_cache(maxsize=1)
def guards_see_everything() -> bool:
    """Whether this torch has the guards, which are not public, and they tell apart all that a signature does."""
    try:
        with torch.inference_mode(False):
            one = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float32, device="cpu")
            holds = _guard_tensors([one])
            same = one.clone()
            others = (
                one.to(torch.int32), one[:1], one.t(), one[None], one.to("meta"), one.to_sparse(), torch._neg_view(one),
                one.clone().requires_grad_(), torch.nn.Parameter(one, requires_grad=False), None,
            )  # fmt: skip
            return holds(same) and not any(map(holds, others))
    except Exception:
        return False


def _address(tensor: torch.Tensor) -> int:
    """0 for a wrapper without storage, as torch.func makes them."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _is_backed(tensor: torch.Tensor, extent: int) -> bool:
    """Whether the storage, if there is one, holds `extent` bytes from the tensor's first element on."""
    try:
        end = tensor.storage_offset() * tensor.element_size() + extent
        return bool(end <= tensor.untyped_storage().nbytes())
    except RuntimeError:
        return True


def _bind(launch: Launch | None, loaded: dict[str, Kernel]) -> tuple[Kernel, Launch] | None:
    return None if launch is None else (loaded[launch.artifact.file], launch)
