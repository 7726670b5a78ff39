"""Runs a golden case through `flashkda.fwd` and says where its bits differ from what they must be."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashkda.api import fwd
from flashkda.arguments import TENSORS
from flashkda.bits import INTEGERS, same_bits
from flashkda.call import record_order
from flashkda.goldens.cases import HEAD_DIM, Case
from flashkda.goldens.digests import Digests, sha256
from flashkda.goldens.inputs import make_inputs
from flashkda.goldens.record import as_recorded, decode_records, tile_bases
from flashkda.manifest import Record
from flashkda.reference import kda_float64, relative_error

_OUT_FILL = 0xAA
_WORKSPACE_FILL = 0xAB
_STATE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Result:
    """What a call wrote: out [B, T, H, 128], final_state [N, H, V, K] or None, and the workspace's bytes.

    The workspace is of `record`s, whose fields lie in `record_order`.
    """

    out: Tensor
    final_state: Tensor | None
    workspace: Tensor
    record: Record
    record_order: str

    def records(self) -> dict[str, NDArray[np.generic]]:
        """The workspace in plain arrays."""
        return decode_records(bits(self.workspace), self.record, self.record_order)

    def same_bits(self, other: "Result") -> bool:
        """Whether all three are equal bit for bit, the records' values in whatever order they lie."""
        pairs = [(self.out, other.out), (self.final_state, other.final_state)]
        if self.record_order == other.record_order:
            pairs.append((self.workspace, other.workspace))
        elif not all(map(np.array_equal, self.records().values(), other.records().values())):
            return False
        return all((a is None and b is None) or (a is not None and b is not None and same_bits(a, b)) for a, b in pairs)


def device_inputs(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The case's tensors on a device, by argument name, absent ones left out."""
    tensors: dict[str, Tensor] = {}
    for name, array in make_inputs(case).items():
        if array.dtype == np.uint16:
            tensors[name] = torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
        else:
            tensors[name] = torch.from_numpy(np.ascontiguousarray(array)).to(device)
    return tensors


def run_case(case: Case, tensors: dict[str, Tensor], record: Record, bv: int | None) -> Result:
    """One call on memory that holds no zeros. Raises every error of `flashkda.fwd`."""
    q = tensors["q"]
    out = _filled(q.numel() * 2, _OUT_FILL, q.device).view(torch.bfloat16).view(q.shape)
    final_state = None
    if case.has_final:
        dtype = _STATE_DTYPES[case.state]
        shape = (len(case.sequences), case.H, HEAD_DIM, HEAD_DIM)
        final_state = _filled(int(np.prod(shape)) * dtype.itemsize, _OUT_FILL, q.device).view(dtype).view(shape)
    workspace = _filled(case.H * tile_bases(case)[1] * record.bytes, _WORKSPACE_FILL, q.device)
    given = tensors | {"out": out, "workspace": workspace}
    order = record_order([given.get(name) for name in TENSORS], case.scale, case.lower_bound, bv)
    fwd(
        q, tensors["k"], tensors["v"], tensors["g"], tensors["beta"], case.scale, out, tensors["A_log"],
        tensors["dt_bias"], case.lower_bound, initial_state=tensors.get("initial_state"), final_state=final_state,
        cu_seqlens=tensors.get("cu_seqlens"), workspace=workspace, bv=bv,
    )  # fmt: skip
    return Result(out, final_state, workspace, record, order)


def wrong_digests(case: Case, result: Result, digests: Digests) -> list[str]:
    """Names of the results whose bits are not the golden's."""
    wrong = [] if sha256(bits(result.out)) == digests.out else ["out"]
    if result.final_state is not None and sha256(bits(result.final_state)) != digests.final_state:
        wrong.append("final_state")
    arrays = as_recorded(case, result.records())
    expected = digests.workspace
    return wrong + [name for name, array in arrays.items() if expected[name] not in (None, sha256(array))]


def leaks(case: Case, result: Result, clean: Result) -> list[str]:
    """Results of a poisoned case that differ from those of its clean twin outside the poison's sequence and head."""
    region = case.may_differ_from_clean()
    if region is None:
        return []
    differs = (bits(result.out) != bits(clean.out)).reshape(-1, case.H, HEAD_DIM)
    differs[region.start : region.end, region.head] = False
    found = ["out"] if differs.any() else []
    if result.final_state is not None and clean.final_state is not None:
        state_differs = bits(result.final_state) != bits(clean.final_state)
        if region.sequence >= 0:
            state_differs[region.sequence, region.head] = False
        if state_differs.any():
            found.append("final_state")
    return found


def float64_errors(case: Case, tensors: dict[str, Tensor], result: Result) -> tuple[float, float | None]:
    """Relative errors of out and final_state against float64."""
    out, final_state = kda_float64(
        tensors["q"], tensors["k"], tensors["v"], tensors["g"], tensors["beta"], case.scale, tensors["A_log"],
        tensors["dt_bias"], case.lower_bound, case.sequences, tensors.get("initial_state"),
    )  # fmt: skip
    error = relative_error(result.out, out)
    return error, None if result.final_state is None else relative_error(result.final_state, final_state)


def bits(tensor: Tensor) -> NDArray[np.generic]:
    """A tensor's bits on the host, as unsigned integers of its element size."""
    size = tensor.element_size()
    return tensor.contiguous().view(INTEGERS[size]).cpu().numpy().view(_UNSIGNED[size])


def _filled(size: int, byte: int, device: torch.device) -> Tensor:
    return torch.full((size,), byte, dtype=torch.uint8, device=device)
