"""The public functions."""

import os
import sys
import threading
from operator import index
from typing import TYPE_CHECKING

from flashkda.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flashkda.call import Call, Guard

_KEPT_SIGNATURES = 1024

_calls: "dict[tuple[object, ...], Call]" = {}
# Guards of the latest calls: a model's layers have one signature or a few, and a guard knows it without building it.
_recent: "tuple[Guard, ...]" = ()
_KEPT_GUARDS = 4
_lock = threading.Lock()


def _after_fork() -> None:
    """Forget calls bound to the parent's kernels, and a lock that one of its threads may have held."""
    global _recent, _lock
    _calls.clear()
    _recent = ()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def fwd(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    g: "Tensor",
    beta: "Tensor",
    scale: float,
    out: "Tensor",
    A_log: "Tensor",
    dt_bias: "Tensor",
    lower_bound: float,
    initial_state: "Tensor | None" = None,
    final_state: "Tensor | None" = None,
    cu_seqlens: "Tensor | None" = None,
    *,
    workspace: "Tensor | None" = None,
    bv: int | None = None,
    state_indices: "Tensor | None" = None,
    has_initial_state: "Tensor | None" = None,
    checkpoints: "Tensor | None" = None,
    checkpoint_cu_starts: "Tensor | None" = None,
    checkpoint_every: int | None = None,
) -> None:
    """Kimi Delta Attention prefill, in place, on the current stream of the tensors' device; never synchronises.

    Fixed length: B sequences of T tokens, N = B. Packed (cu_seqlens given): B = 1, N sequences along T. H heads,
    K = V = 128. All tensors are on one CUDA device; T, B, H may be 0 and sequences may be empty.

    Args:
        q, k, g: bf16 [B, T, H, K]; query, key (both normalised here) and gate before activation.
        v: bf16 [B, T, H, V].
        beta: bf16 [B, T, H], logits (the sigmoid is applied here), any strides.
        scale: finite, for q; usually K ** -0.5.
        out: bf16 [B, T, H, V], written. Tokens outside every sequence are left as they are.
        A_log: fp32, H elements, contiguous ([H] or [1, 1, H, 1]).
        dt_bias: fp32, H*K elements, contiguous ([H, K] or [H*K]).
        lower_bound: from -5 to 0, of the gate's logarithm (base e).
        initial_state: bf16 or fp32 [N, H, V, K], or None for zeros. It is rounded to bf16.
        final_state: bf16 or fp32 [N, H, V, K], written, or None. May be initial_state itself. Where a sequence is
            empty it is the initial state, rounded to bf16.
        cu_seqlens: int32 or int64 [N + 1], on the device, contiguous, non-decreasing from 0 to T at most. Never read
            by the host; wrong values give meaningless results for their sequences but no access outside the tensors.
        workspace: uint8, 1-D, contiguous, 16-byte aligned, of `workspace_size` bytes or more; None allocates it.
            Calls that may run at the same time need one each.
        bv: value columns a CTA, one of those compiled; None chooses by shape and device. Results do not depend on it.
        state_indices: int32 or int64 [N], contiguous, on the device. With it initial_state and final_state (one of them
            at least) are pools [slots, H, V, K], and sequence n reads and writes slot state_indices[n]. A negative
            index, or one past a pool (the smaller one), is a padding request: neither its state, its out nor its
            checkpoints are read or written. A slot that two other sequences share ends up undefined. Never read by the
            host.
        has_initial_state: bool [N], contiguous, on the device, only with initial_state. A sequence whose entry is False
            starts from zeros; its slot is neither read nor cleared. None is all True. Never read by the host.
        checkpoints: bf16 or fp32 [C, H, V, K], written: states within the sequences, for prefix caches. Sequence n owns
            rows checkpoint_cu_starts[n] to checkpoint_cu_starts[n + 1] - 1, one for every `checkpoint_every` tokens
            begun. Row j holds the state before token j * checkpoint_every, equal in bits to the final_state of the call
            on the sequence cut there; row 0 is the initial state, rounded to bf16. Rows past those owned, and past C,
            are left as they are. (What FlashInfer's KDA prefill calls state_checkpoints.)
        checkpoint_cu_starts: int32 or int64 [N + 1], contiguous, on the device. Required where cu_seqlens and
            checkpoints are given; for fixed length None is n * ceil(T / checkpoint_every). Never read by the host.
        checkpoint_every: tokens between checkpoints, a positive multiple of 16; given with checkpoints and only then.

    q, k, v, g, out: innermost stride 1, rows 16-byte aligned, otherwise any strides. States and checkpoints: contiguous
    but for the first dimension's stride, 16-byte aligned. All others need their element's alignment only. out,
    final_state, workspace and checkpoints overlap nothing else.

    Under torch.compile and torch.export this traces to the operator `torch.ops.flashkda.fwd`.

    Raises:
        ArgumentError (a ValueError): an argument is not usable, or requires grad while grad mode is on (there is no
            backward pass); nothing was launched.
        NoArtifactError: no compiled kernel fits the device.
        ArtifactError: the compiled kernels are missing or were changed.
        DriverError (a RuntimeError): no driver, too old, or a CUDA call failed.
    """
    try:
        import torch
    except ImportError:
        raise _without_torch("q", q) from None
    if torch.compiler.is_compiling():
        from flashkda.torch_operator import fwd as operator

        operator(
            q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
            workspace=workspace, bv=bv, state_indices=state_indices, has_initial_state=has_initial_state,
            checkpoints=checkpoints, checkpoint_cu_starts=checkpoint_cu_starts, checkpoint_every=checkpoint_every,
        )  # fmt: skip
        return
    tensors = (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens, workspace)
    if state_indices is has_initial_state is checkpoints is checkpoint_cu_starts is checkpoint_every is None:
        run(tensors, scale, lower_bound, bv)
        return
    pools = (state_indices, has_initial_state, checkpoints, checkpoint_cu_starts)
    run(tensors + pools, scale, lower_bound, bv, checkpoint_every)


def prefill(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    g: "Tensor",
    beta: "Tensor",
    scale: float,
    A_log: "Tensor",
    dt_bias: "Tensor",
    lower_bound: float,
    initial_state: "Tensor | None" = None,
    output_final_state: bool = False,
    cu_seqlens: "Tensor | None" = None,
    *,
    workspace: "Tensor | None" = None,
    bv: int | None = None,
) -> "tuple[Tensor, Tensor | None]":
    """`fwd` that allocates and returns its results: (out, final_state).

    out: bf16 [B, T, H, V], contiguous; its tokens outside every sequence are undefined. final_state: fp32 [N, H, V, K]
    if `output_final_state`, else None. All other arguments, and what is raised, as for `fwd`, whose state pools and
    checkpoints belong to the caller and have no place here.
    """
    try:
        from flashkda.arguments import make_results
    except ImportError:
        raise _without_torch("v", v) from None

    out, final_state = make_results(v, cu_seqlens, output_final_state)
    fwd(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
        workspace=workspace, bv=bv,
    )  # fmt: skip
    return out, final_state


def run(
    tensors: "tuple[Tensor | None, ...]",
    scale: float,
    lower_bound: float,
    bv: int | None,
    checkpoint_every: int | None = None,
) -> None:
    """`fwd` on real tensors: `flashkda.arguments.TENSORS` in their order, or `ALL_TENSORS`."""
    global _recent
    # Those of `TENSORS` that may be absent.
    initial, final, cu_seqlens, workspace = tensors[8:12]
    # The types come first: True == 1 == 1.0, and comparing with a tensor or an array gives no plain bool.
    key: tuple[object, ...] = (
        initial is None, final is None, cu_seqlens is None, workspace is None, initial is final,
        type(scale), type(lower_bound), type(bv), scale, lower_bound, bv,
    )  # fmt: skip
    if len(tensors) > 12:
        key += (*[one is None for one in tensors[12:]], type(checkpoint_every), checkpoint_every)
    recent, known, examined = _recent, None, False
    addresses: tuple[int, ...] | None
    try:
        addresses = tuple([0 if one is None else one.data_ptr() for one in tensors])
        for guard in recent:
            if guard.key == key:
                given = guard.pick(tensors)
                # Torch's guards end the process at a nested tensor. None was accepted at addresses seen before.
                examined = addresses in guard.call.examined
                if (examined or not any([one.is_nested for one in given])) and guard.holds(*given):
                    known = guard
                    break
    except Exception:
        # Not tensors, or none with memory, whatever they raise.
        addresses = None
    if known is not None:
        known.call.run(tensors, addresses, known.free_of_gradients, examined)
        return
    signature, call = None, None
    try:
        layouts = [
            None if one is None else (one.shape, one.stride(), one.dtype, one.device, one.is_neg()) for one in tensors
        ]
        signature = (key, *layouts)
        call = _calls.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, not strided, not numbers: the full check says what and why.
        signature = None
    if call is None:
        _make_call(signature, tensors, scale, lower_bound, bv, checkpoint_every).run(tensors, addresses)
        return
    call.run(tensors, addresses)
    # Not at the first call: one that never comes back needs no guard.
    renewed = call.renew_guard(key, tensors, recent)
    if renewed is not None:
        _recent = (renewed, *[guard for guard in recent if guard.call is not call][: _KEPT_GUARDS - 1])


def _without_torch(name: str, value: object) -> ArgumentError:
    return ArgumentError(name, f"a {type(value).__qualname__}", "a torch.Tensor", "install torch and pass its tensors")


def _make_call(
    signature: tuple[object, ...] | None,
    tensors: "tuple[Tensor | None, ...]",
    scale: float,
    lower_bound: float,
    bv: int | None,
    checkpoint_every: int | None,
) -> "Call":
    from flashkda.call import make_call

    call = make_call(tensors, scale, lower_bound, bv, checkpoint_every)
    if signature is None:
        return call
    with _lock:
        if len(_calls) >= _KEPT_SIGNATURES:
            del _calls[next(iter(_calls))]
        _calls[signature] = call
    return call


def workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of workspace that a call needs at most, fixed length or packed.

    T_total: tokens of all sequences together (B*T); H: heads; N: sequences (B, or len(cu_seqlens) - 1).
    The arguments are those of flash_kda.get_workspace_size. Raises `ArgumentError` or `ArtifactError`.
    """
    from flashkda.artifacts import installed
    from flashkda.planner import workspace_bound

    tokens, heads, sequences = _size("T_total", T_total), _size("H", H), _size("N", N)
    return workspace_bound(tokens, heads, sequences, installed().manifest.contract)


def _size(name: str, value: object) -> int:
    """A size given as any kind of integer, NumPy's among them."""
    try:
        size = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        size = -1
    if size < 0:
        raise ArgumentError(name, repr(value), "an int of at least 0", "pass the sizes of the call")
    return size


def preload(device: "int | str | torch.device | None" = None) -> None:
    """Load every kernel of a device: its first `fwd` then has nothing to load and can be captured in a CUDA graph.

    Where torch is imported, also the modules that a first call would import, and their look at torch's guards.

    device: an index among the visible CUDA devices (needs no torch), or what torch.device accepts; None is torch's
    current device, or device 0 where torch is not imported.
    Raises `ArgumentError`, `NoArtifactError`, `ArtifactError` or `DriverError`.
    """
    from flashkda.driver import get_driver
    from flashkda.kernels import device_kernels

    # A wrong argument is wrong with any driver; what None means, only a driver can tell.
    given = None if device is None else _ordinal(device)
    count = get_driver().device_count()
    ordinal = _ordinal(None) if given is None else given
    if not 0 <= ordinal < count:
        raise ArgumentError("device", repr(device), f"one of the {count} visible CUDA devices", "see flashkda info")
    kernels = device_kernels(ordinal)
    kernels.ready(kernels.variants.artifacts(), None)
    if "torch" in sys.modules:
        from flashkda.call import guards_see_everything

        guards_see_everything()


def _ordinal(device: "int | str | torch.device | None") -> int:
    if isinstance(device, int):
        return device
    if device is None and "torch" not in sys.modules:
        return 0
    import torch

    try:
        parsed = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError("device", repr(device), "a CUDA device", "pass an index or 'cuda:N'") from error
    if parsed.type != "cuda":
        raise ArgumentError("device", repr(device), "a CUDA device", "pass an index or 'cuda:N'")
    if parsed.index is not None:
        return int(parsed.index)
    if not torch.cuda.is_available():
        raise ArgumentError("device", repr(device), "an index, as this torch cannot use CUDA", "pass 0 for the first")
    return int(torch.cuda.current_device())
