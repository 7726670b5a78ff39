"""The checks of one call's arguments, and the numbers they come to.

Everything here depends on shapes, strides, dtypes and devices alone, so the outcome is kept for later calls of the same
signature; what depends on addresses is checked at each call (`flashkda.call`). Imported only once there is something to
check.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import torch

from flashkda.errors import ArgumentError, describe
from flashkda.layout import EMPTY, Layout, make_layout
from flashkda.manifest import Contract
from flashkda.planner import INT32_MAX, Problem

TENSORS = (
    "q", "k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens", "workspace",
)  # fmt: skip
# Those of state pools and checkpoints follow, all four or, as most calls have none, none of them.
TENSORS_OF_POOLS = ("state_indices", "has_initial_state", "checkpoints", "checkpoint_cu_starts")
ALL_TENSORS = TENSORS + TENSORS_OF_POOLS
ROW_ALIGNMENT = 16
STATE_CODES = {torch.bfloat16: 1, torch.float32: 2}

_NAMES = {
    torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32", torch.int64: "int64",
    torch.bool: "bool",
}  # fmt: skip
_INDICES = (torch.int32, torch.int64)
_OPTIONAL = ("initial_state", "final_state", "cu_seqlens", "workspace", *TENSORS_OF_POOLS)
_SAFE_LOWER_BOUND = -5.0


class Checked(NamedTuple):
    """Accepted arguments.

    layouts and alignments (bytes) run in the order of `ALL_TENSORS`; an absent tensor has an empty layout.
    workspace_bytes: size of the given workspace, None if there is none.
    """

    problem: Problem
    device: torch.device
    layouts: tuple[Layout, ...]
    alignments: tuple[int, ...]
    workspace_bytes: int | None


def check(
    contract: Contract,
    tensors: Sequence[object],
    scale: object,
    lower_bound: object,
    bv: object,
    checkpoint_every: object = None,
) -> Checked:
    """Check a call; `tensors` are `TENSORS`, or `ALL_TENSORS`. Raises `ArgumentError` that names the first offender."""
    given = dict.fromkeys(ALL_TENSORS)
    given |= {name: _tensor(name, value) for name, value in zip(ALL_TENSORS, tensors, strict=False)}
    q, k, v, g, beta, out, a_log, dt_bias = (_present(name, given[name]) for name in TENSORS[:8])
    initial, final, cu_seqlens, workspace, state_indices, has_initial, checkpoints, starts = (
        given[name] for name in _OPTIONAL
    )
    _require_one_device(given)

    dim = contract.head_dim
    if q.dim() != 4 or q.shape[3] != dim:
        raise _shape_error("q", q, f"[B, T, H, {dim}]")
    batch, seqlen, heads, _ = q.shape
    shape = (batch, seqlen, heads, dim)
    for name, rows in (("q", q), ("k", k), ("v", v), ("g", g), ("out", out)):
        _require(name, rows, (torch.bfloat16,), shape, "the shape of q")
        _require_rows(name, rows)
    _require("beta", beta, (torch.bfloat16,), shape[:3], "[B, T, H] as in q")
    if not _row_layout(out).distinct:
        raise ArgumentError(
            "out", f"a view with strides {_list(out.stride())} whose rows overlap", "free of overlap within itself",
            "give it memory of its own, e.g. torch.empty_like(v)",
        )  # fmt: skip
    _require_parameter("A_log", a_log, heads, "H")
    _require_parameter("dt_bias", dt_bias, heads * dim, f"H*{dim}")

    sequences = batch
    if cu_seqlens is not None:
        _require_cu_seqlens(cu_seqlens, batch)
        sequences = cu_seqlens.numel() - 1
    slots = 0
    states = {"initial_state": initial, "final_state": final}
    present = {name: state for name, state in states.items() if state is not None}
    for name, state in present.items():
        if state_indices is None:
            _require_state(name, state, (heads, dim, dim), "N", sequences)
        else:
            _require_state(name, state, (heads, dim, dim), "slots")
    if state_indices is not None:
        _require_vector("state_indices", state_indices, _INDICES, sequences, "N")
        if not present:
            raise ArgumentError(
                "state_indices", "given without a state", "None without initial_state and final_state",
                "pass the state pool it points into",
            )  # fmt: skip
        slots = min(pool.shape[0] for pool in present.values())
    if has_initial is not None:
        _require_vector("has_initial_state", has_initial, (torch.bool,), sequences, "N")
        if initial is None:
            raise ArgumentError(
                "has_initial_state", "given without initial_state", "None without it",
                "leave both out where every sequence starts from zero",
            )  # fmt: skip
    every = _checkpoint_every(checkpoint_every, checkpoints is not None, contract.chunk)
    if checkpoints is not None:
        _require_state("checkpoints", checkpoints, (heads, dim, dim), "C")
    _require_starts(starts, checkpoints is not None, cu_seqlens is not None, sequences)
    if workspace is not None:
        _require_workspace(workspace)
    if bv is not None and (not isinstance(bv, int) or isinstance(bv, bool)):
        raise ArgumentError("bv", describe(bv), "None or an int", "leave bv out for the automatic choice")

    problem = Problem(
        batch=batch,
        seqlen=seqlen,
        heads=heads,
        sequences=sequences,
        packed=cu_seqlens is not None,
        cu_seqlens_is_int64=cu_seqlens is not None and cu_seqlens.dtype == torch.int64,
        q_strides=_token_strides(q),
        k_strides=_token_strides(k),
        v_strides=_token_strides(v),
        g_strides=_token_strides(g),
        beta_strides=_token_strides(beta),
        out_strides=_token_strides(out),
        initial_stride=0 if initial is None else initial.stride(0),
        final_stride=0 if final is None else final.stride(0),
        initial_dtype=0 if initial is None else STATE_CODES[initial.dtype],
        final_dtype=0 if final is None else STATE_CODES[final.dtype],
        scale=_scale(scale),
        lower_bound=_lower_bound(lower_bound),
        bv=bv,
        slots=slots,
        state_indices_is_int64=state_indices is not None and state_indices.dtype == torch.int64,
        checkpoints=0 if checkpoints is None else checkpoints.shape[0],
        checkpoint_stride=0 if checkpoints is None else checkpoints.stride(0),
        checkpoint_dtype=0 if checkpoints is None else STATE_CODES[checkpoints.dtype],
        checkpoint_every=every,
        checkpoint_starts_is_int64=starts is not None and starts.dtype == torch.int64,
    )
    layouts = {name: _row_layout(rows) for name, rows in (("q", q), ("k", k), ("v", v), ("g", g), ("out", out))}
    layouts["beta"] = make_layout(tuple(beta.shape), beta.stride(), beta.element_size(), 1)
    for name in ("initial_state", "final_state", "checkpoints"):
        state = given[name]
        if state is not None:
            slot = heads * dim * dim
            layouts[name] = make_layout((state.shape[0],), (state.stride(0),), state.element_size(), slot)
    for name, tensor in given.items():
        # What is left is contiguous.
        if tensor is not None and name not in layouts:
            layouts[name] = make_layout((), (), tensor.element_size(), tensor.numel())
    alignments = {
        "beta": 2,
        "A_log": 4,
        "dt_bias": 4,
        "cu_seqlens": 8 if problem.cu_seqlens_is_int64 else 4,
        "workspace": contract.workspace_alignment,
        "state_indices": 8 if problem.state_indices_is_int64 else 4,
        "has_initial_state": 1,
        "checkpoint_cu_starts": 8 if problem.checkpoint_starts_is_int64 else 4,
    }
    return Checked(
        problem=problem,
        device=q.device,
        layouts=tuple(layouts.get(name, EMPTY) for name in ALL_TENSORS),
        alignments=tuple(alignments.get(name, ROW_ALIGNMENT) for name in ALL_TENSORS),
        workspace_bytes=None if workspace is None else workspace.numel(),
    )


def refuse_gradients(given: Mapping[str, object]) -> None:
    """Raise `ArgumentError` if gradients are being recorded and one of these arguments, by name, requires them."""
    if not torch.is_grad_enabled():
        return
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ArgumentError(
                name, "a tensor that requires grad", "free of it, as there is no backward pass",
                "call under torch.no_grad() or torch.inference_mode()",
            )  # fmt: skip


def make_results(v: object, cu_seqlens: object, with_state: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """New, uninitialised out like `v` [B, T, H, V], and fp32 final_state [N, H, V, V] if asked for.

    Raises `ArgumentError` for what keeps their shapes from being known; the rest is for `check`.
    """
    if not isinstance(v, torch.Tensor):
        raise ArgumentError("v", describe(v), "a torch.Tensor", "pass a tensor on a CUDA device")
    if v.dim() != 4:
        raise _shape_error("v", v, "[B, T, H, V]")
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not with_state:
        return out, None
    batch, _, heads, dim = v.shape
    sequences = batch
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, torch.Tensor):
            raise ArgumentError(
                "cu_seqlens", describe(cu_seqlens), "a torch.Tensor or None", "pass a tensor on a CUDA device"
            )
        _require_cu_seqlens(cu_seqlens, batch)
        sequences = cu_seqlens.shape[0] - 1
    return out, torch.empty((sequences, heads, dim, dim), dtype=torch.float32, device=v.device)


def _tensor(name: str, value: object) -> torch.Tensor | None:
    if value is None and name in _OPTIONAL:
        return None
    if not isinstance(value, torch.Tensor):
        allowed = "a torch.Tensor or None" if name in _OPTIONAL else "a torch.Tensor"
        raise ArgumentError(name, describe(value), allowed, "pass a tensor on a CUDA device")
    if not _is_plain(value):
        found = "nested, uninitialised or a lazy view" if value.layout == torch.strided else f"a {value.layout} tensor"
        raise ArgumentError(name, found, "a plain strided tensor", "materialise it")
    if value.device.type != "cuda":
        raise ArgumentError(
            name, f"a tensor on {value.device}", "a tensor on a CUDA device", f"move it with {name}.to('cuda')"
        )
    return value


def _is_plain(tensor: torch.Tensor) -> bool:
    try:
        return tensor.layout == torch.strided and not tensor.is_neg() and not tensor.is_nested
    except ValueError:
        # What torch.nn's uninitialised parameters raise.
        return False


def _present(name: str, value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise ArgumentError(name, "None", "a torch.Tensor", "pass a tensor on a CUDA device")
    return value


def _require_one_device(given: dict[str, torch.Tensor | None]) -> None:
    first = _present("q", given["q"]).device
    for name, tensor in given.items():
        if tensor is not None and tensor.device != first:
            raise ArgumentError(
                name, f"a tensor on {tensor.device}", f"on {first}, where q is", f"move it with {name}.to(q.device)"
            )


def _require(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], what: str
) -> None:
    _require_dtype(name, tensor, dtypes)
    if tuple(tensor.shape) != shape:
        raise _shape_error(name, tensor, f"{_list(shape)} ({what})")


def _require_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        allowed = " or ".join(_NAMES[dtype] for dtype in dtypes)
        raise ArgumentError(name, f"a tensor of {tensor.dtype}", allowed, f"convert it with {name}.to(...)")


def _require_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ArgumentError(name, "not contiguous", "contiguous", f"copy it with {name}.contiguous()")


def _require_rows(name: str, tensor: torch.Tensor) -> None:
    strides = tensor.stride()
    if tensor.numel() == 0:
        return
    if strides[3] != 1:
        raise ArgumentError(
            name, f"a view with stride {strides[3]} in its last dimension", "contiguous there (stride 1)",
            f"copy it with {name}.contiguous()",
        )  # fmt: skip
    step = ROW_ALIGNMENT // tensor.element_size()
    for size, stride, dimension in zip(tensor.shape[:3], strides[:3], "BTH", strict=True):
        if size > 1 and stride % step:
            raise ArgumentError(
                name, f"a view with stride {stride} in dimension {dimension}",
                f"one whose rows start {ROW_ALIGNMENT}-byte aligned (strides that are multiples of {step} elements)",
                f"copy it with {name}.contiguous()",
            )  # fmt: skip


def _require_parameter(name: str, tensor: torch.Tensor, numel: int, what: str) -> None:
    if tensor.dtype != torch.float32:
        raise ArgumentError(name, f"a tensor of {tensor.dtype}", "float32", f"convert it with {name}.float()")
    if tensor.numel() != numel:
        raise ArgumentError(
            name,
            f"a tensor of shape {_list(tensor.shape)}",
            f"of {numel} elements ({what})",
            "check the number of heads",
        )
    _require_contiguous(name, tensor)


def _require_cu_seqlens(cu_seqlens: torch.Tensor, batch: int) -> None:
    if cu_seqlens.dtype not in _INDICES:
        raise ArgumentError(
            "cu_seqlens",
            f"a tensor of {cu_seqlens.dtype}",
            "int32 or int64",
            "convert it with cu_seqlens.to(torch.int32)",
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise _shape_error("cu_seqlens", cu_seqlens, "[N + 1] with at least one sequence")
    _require_contiguous("cu_seqlens", cu_seqlens)
    if batch != 1:
        raise ArgumentError(
            "q", f"a batch of {batch} together with cu_seqlens", "of B = 1 when cu_seqlens is given",
            "pack the sequences along T",
        )  # fmt: skip


def _require_vector(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], size: int, what: str) -> None:
    _require(name, tensor, dtypes, (size,), f"[{what}]")
    _require_contiguous(name, tensor)


def _require_starts(starts: torch.Tensor | None, checkpoints: bool, packed: bool, sequences: int) -> None:
    name = "checkpoint_cu_starts"
    if starts is None:
        if checkpoints and packed:
            raise ArgumentError(
                name, "None", "given where checkpoints and cu_seqlens are",
                "pass each sequence's first row in checkpoints, and their end",
            )  # fmt: skip
        return
    if not checkpoints:
        raise ArgumentError(name, "given without checkpoints", "None without them", "pass checkpoints or leave it out")
    _require_vector(name, starts, _INDICES, sequences + 1, "N + 1")


def _require_state(
    name: str, state: torch.Tensor, slot_shape: tuple[int, int, int], what: str, count: int | None = None
) -> None:
    """`count` slots, which `what` names; any number of them if None."""
    _require_dtype(name, state, tuple(STATE_CODES))
    if state.dim() != 4 or tuple(state.shape[1:]) != slot_shape or count not in (None, state.shape[0]):
        sizes = ", ".join(map(str, (what if count is None else count, *slot_shape)))
        raise _shape_error(name, state, f"[{sizes}] ([{what}, H, V, K])")
    if state.numel() == 0:
        return
    heads, rows, columns = slot_shape
    slot = heads * rows * columns
    inner = zip(slot_shape, state.stride()[1:], (rows * columns, columns, 1), strict=True)
    if any(size > 1 and stride != expected for size, stride, expected in inner):
        raise ArgumentError(
            name, f"a view with strides {_list(state.stride())}", "contiguous in its last three dimensions",
            f"copy it with {name}.contiguous()",
        )  # fmt: skip
    if state.shape[0] > 1 and (state.stride(0) < slot or state.stride(0) * state.element_size() % ROW_ALIGNMENT):
        raise ArgumentError(
            name, f"a view with stride {state.stride(0)} in its first dimension",
            f"one with at least {slot} (H*V*K) there, in steps of {ROW_ALIGNMENT} bytes",
            f"copy it with {name}.contiguous()",
        )  # fmt: skip


def _require_workspace(workspace: torch.Tensor) -> None:
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise ArgumentError(
            "workspace", f"a tensor of {workspace.dtype}, shape {_list(workspace.shape)}",
            "a contiguous 1-D tensor of uint8",
            "make it with torch.empty(flashkda.workspace_size(T_total, H, N), dtype=torch.uint8, device=q.device)",
        )  # fmt: skip


def _scale(value: object) -> float:
    number = _number(value)
    try:
        struct.pack("<f", number)
    except OverflowError:
        number = math.nan
    if math.isfinite(number):
        return number
    raise ArgumentError("scale", describe(value), "a finite number within float32", "the usual value is 128 ** -0.5")


def _lower_bound(value: object) -> float:
    number = _number(value)
    if _SAFE_LOWER_BOUND <= number <= 0:
        return number
    raise ArgumentError(
        "lower_bound", describe(value), f"a number from {_SAFE_LOWER_BOUND:g} to 0",
        "only the safe gate is computed, lower_bound * sigmoid(...): over a chunk of 16 tokens a lower bound under "
        f"{_SAFE_LOWER_BOUND:g} would take the decay factors out of float range",
    )  # fmt: skip


def _checkpoint_every(value: object, checkpoints: bool, chunk: int) -> int:
    """0 without checkpoints."""
    if value is None and not checkpoints:
        return 0
    if not checkpoints:
        raise ArgumentError(
            "checkpoint_every", f"{describe(value)} without checkpoints", "None without them",
            "pass checkpoints or leave it out",
        )  # fmt: skip
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= INT32_MAX and value % chunk == 0:
        return value
    raise ArgumentError(
        "checkpoint_every", describe(value), f"a positive multiple of {chunk}, at most {INT32_MAX}, with checkpoints",
        "states exist only between chunks",
    )  # fmt: skip


def _number(value: object) -> float:
    """NaN for what is no real number, or one past float64; 0.0 for -0.0, as calls that compare equal share a plan."""
    if not isinstance(value, Real):
        return math.nan
    try:
        return float(value) + 0.0
    except OverflowError:
        return math.nan


def _shape_error(name: str, tensor: torch.Tensor, allowed: str) -> ArgumentError:
    return ArgumentError(name, f"a tensor of shape {_list(tensor.shape)}", allowed, "check the shapes against q's")


def _token_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    batch, token, head = tensor.stride()[:3]
    return batch, token, head


def _row_layout(tensor: torch.Tensor) -> Layout:
    return make_layout(tuple(tensor.shape[:3]), tensor.stride()[:3], tensor.element_size(), tensor.shape[3])


def _list(numbers: Sequence[int]) -> str:
    return str(list(numbers))
