"""`flashkda.fwd` on made-up devices: what it refuses, what it launches, and how it leaves the caller's context."""

import gc
import inspect
import logging
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashkda
from flashkda.driver import get_driver
from flashkda.errors import ArgumentError, ArtifactError, DriverError, NoArtifactError

torch = pytest.importorskip("torch")

Arguments = dict[str, Any]


@pytest.fixture
def arguments(on_cuda: Callable[..., Any], artifact_folder: Path) -> Callable[..., Arguments]:
    """Sound arguments of a call; keywords change the shape."""

    def make(
        batch: int = 1, seqlen: int = 40, heads: int = 2, sequences: int | None = None, ordinal: int = 0
    ) -> Arguments:
        def rows() -> Any:
            return on_cuda(torch.zeros(batch, seqlen, heads, 128, dtype=torch.bfloat16), ordinal)

        found: Arguments = {name: rows() for name in ("q", "k", "v", "g", "out")}
        found["beta"] = on_cuda(torch.zeros(batch, seqlen, heads, dtype=torch.bfloat16), ordinal)
        found["A_log"] = on_cuda(torch.zeros(heads), ordinal)
        found["dt_bias"] = on_cuda(torch.zeros(heads, 128), ordinal)
        found |= {"scale": 128**-0.5, "lower_bound": -5.0}
        if sequences is not None:
            found["cu_seqlens"] = on_cuda(torch.zeros(sequences + 1, dtype=torch.int64), ordinal)
        return found

    return make


@pytest.fixture
def state(on_cuda: Callable[..., Any]) -> Callable[..., Any]:
    def make(sequences: int = 1, heads: int = 2, dtype: Any = torch.float32, ordinal: int = 0) -> Any:
        return on_cuda(torch.zeros(sequences, heads, 128, 128, dtype=dtype), ordinal)

    return make


@pytest.fixture
def pools(on_cuda: Callable[..., Any]) -> Callable[..., Arguments]:
    """State pools and checkpoints of a packed call, in full; `rows` of each."""

    def make(sequences: int = 3, heads: int = 2, rows: int = 5) -> Arguments:
        def states(count: int, dtype: Any) -> Any:
            return on_cuda(torch.zeros(count, heads, 128, 128, dtype=dtype))

        return {
            "initial_state": states(rows, torch.bfloat16),
            "final_state": states(rows + 1, torch.float32),
            "state_indices": on_cuda(torch.zeros(sequences, dtype=torch.int32)),
            "has_initial_state": on_cuda(torch.zeros(sequences, dtype=torch.bool)),
            "checkpoints": states(rows + 2, torch.float32),
            "checkpoint_cu_starts": on_cuda(torch.zeros(sequences + 1, dtype=torch.int64)),
            "checkpoint_every": 64,
        }

    return make


def refusal(arguments: Arguments) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        flashkda.fwd(**arguments)
    return caught.value


# --- refused arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "out", "A_log", "dt_bias"])
def test_a_cpu_tensor_is_refused_by_name_without_a_driver(arguments: Callable[..., Arguments], name: str) -> None:
    call = arguments()
    call[name] = call[name].as_subclass(torch.Tensor)
    error = refusal(call)
    assert error.argument == name
    assert "on cpu" in str(error) and f"{name}.to('cuda')" in str(error)
    assert isinstance(error, ValueError)


def test_plain_cpu_and_meta_calls_are_refused(artifact_folder: Path) -> None:
    for device in ("cpu", "meta"):
        rows = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16, device=device)
        with pytest.raises(ArgumentError, match=f"on {device}"):
            flashkda.fwd(rows, rows, rows, rows, rows[..., 0], 1.0, rows, rows, rows, -5.0)


@pytest.mark.parametrize("value", [None, 3, [1.0], "q", object()])
def test_what_is_no_tensor_is_refused(arguments: Callable[..., Arguments], value: object) -> None:
    error = refusal(arguments() | {"g": value})
    assert error.argument == "g" and "torch.Tensor" in error.allowed


def test_sparse_tensors_are_refused(arguments: Callable[..., Arguments]) -> None:
    assert refusal(arguments() | {"k": torch.eye(4).to_sparse()}).argument == "k"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_do_not_lie_as_their_strides_say_are_refused(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    call = arguments()
    nested = on_cuda(torch.nested.nested_tensor([torch.zeros(40, 2, 128, dtype=torch.bfloat16)]))
    # Three times: the guard of a known call would end the process at a nested tensor.
    for _ in range(3):
        flashkda.fwd(**call)
        assert refusal(call | {"v": nested}).argument == "v"
    for value in (torch._neg_view(call["v"]), torch.nn.parameter.UninitializedParameter()):
        error = refusal(call | {"v": value})
        assert (error.argument, error.allowed) == ("v", "a plain strided tensor")


def test_a_view_of_a_freed_storage_is_refused(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any, repeated: Callable[..., None]
) -> None:
    flat = torch.zeros(4 + 2 * 128)
    call = arguments() | {"dt_bias": on_cuda(flat[4:].view(2, 128))}
    repeated(call)
    flat.untyped_storage().resize_(0)
    assert call["dt_bias"].data_ptr() == 16
    error = refusal(call)
    assert error.argument == "dt_bias" and "freed" in error.value
    assert len(cuda.launches) == 6


def change_dtype(name: str, dtype: Any) -> Callable[[Arguments], Arguments]:
    return lambda call: call | {name: call[name].to(dtype)}


def replace(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda call: call | {name: change(call[name])}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        *[(name, change_dtype(name, torch.float16), "bfloat16") for name in ("q", "k", "v", "g", "out", "beta")],
        ("A_log", change_dtype("A_log", torch.bfloat16), "float32"),
        ("dt_bias", change_dtype("dt_bias", torch.float64), "float32"),
        ("q", replace("q", lambda t: t[0]), "[B, T, H, 128]"),
        ("q", replace("q", lambda t: t[..., :64]), "[B, T, H, 128]"),
        ("k", replace("k", lambda t: t[:, 1:]), "[1, 40, 2, 128]"),
        ("v", replace("v", lambda t: t[:, :, :1]), "[1, 40, 2, 128]"),
        ("out", replace("out", lambda t: t.expand(3, -1, -1, -1)), "[1, 40, 2, 128]"),
        ("beta", replace("beta", lambda t: t[..., None]), "[1, 40, 2]"),
        ("A_log", replace("A_log", lambda t: t[:1]), "2 elements"),
        ("dt_bias", replace("dt_bias", lambda t: t[:, :64]), "256 elements"),
        ("dt_bias", replace("dt_bias", lambda t: t.reshape(128, 2).t()), "contiguous"),
        ("g", replace("g", lambda t: t.new_zeros(1, 40, 128, 2).transpose(2, 3)), "contiguous there"),
        ("g", replace("g", lambda t: t.new_zeros(1, 40, 2, 132)[..., :128]), "multiples of 8 elements"),
        ("out", replace("out", lambda t: t[:, :1].expand(-1, 40, -1, -1)), "free of overlap within itself"),
    ],
)
def test_a_wrong_dtype_shape_or_stride_is_refused(
    arguments: Callable[..., Arguments], name: str, change: Callable[[Arguments], Arguments], says: str
) -> None:
    error = refusal(change(arguments()))
    assert error.argument == name
    assert says in error.allowed


def test_tensors_on_two_devices_are_refused(arguments: Callable[..., Arguments]) -> None:
    error = refusal(arguments() | {"v": arguments(ordinal=1)["v"]})
    assert (error.argument, error.value) == ("v", "a tensor on cuda:1")


@pytest.mark.parametrize("scale", [None, float("nan"), float("inf"), 1e39, "1", 1j, [1.0]])
def test_a_scale_that_is_no_finite_float32_is_refused(arguments: Callable[..., Arguments], scale: object) -> None:
    assert refusal(arguments() | {"scale": scale}).argument == "scale"


@pytest.mark.parametrize("bound", [None, -5.01, 0.1, float("nan"), float("-inf"), "-5"])
def test_a_lower_bound_outside_the_safe_gate_is_refused_with_the_reason(
    arguments: Callable[..., Arguments], bound: object
) -> None:
    error = refusal(arguments() | {"lower_bound": bound})
    assert error.argument == "lower_bound" and "safe gate" in str(error)


@pytest.mark.parametrize("bv", [8, True, 32.0, "32"])
def test_a_bv_outside_the_manifest_is_refused(arguments: Callable[..., Arguments], cuda: Any, bv: object) -> None:
    assert refusal(arguments() | {"bv": bv}).argument == "bv"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.to(torch.int16), "int32 or int64"),
        (lambda t: t[:1], "[N + 1]"),
        (lambda t: t[None], "[N + 1]"),
        (lambda t: t.repeat_interleave(2)[::2], "contiguous"),
    ],
)
def test_wrong_cu_seqlens_are_refused(
    arguments: Callable[..., Arguments], change: Callable[[Any], Any], says: str
) -> None:
    call = arguments(sequences=3)
    error = refusal(call | {"cu_seqlens": change(call["cu_seqlens"])})
    assert error.argument == "cu_seqlens" and says in error.allowed


@pytest.mark.parametrize("batch", [0, 2])
def test_cu_seqlens_needs_a_batch_of_one(arguments: Callable[..., Arguments], batch: int) -> None:
    assert "B = 1" in refusal(arguments(batch=batch, sequences=3)).allowed


@pytest.mark.parametrize("name", ["initial_state", "final_state"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.half(), "bfloat16 or float32"),
        (lambda t: t[:1], "[2, 2, 128, 128]"),
        (lambda t: t.transpose(2, 3), "contiguous in its last three dimensions"),
        (lambda t: t[:1].expand(2, -1, -1, -1), "at least 32768"),
        (lambda t: t.new_zeros(70000).as_strided((2, 2, 128, 128), (32769, 16384, 128, 1)), "steps of 16 bytes"),
    ],
)
def test_a_wrong_state_is_refused(
    arguments: Callable[..., Arguments],
    state: Callable[..., Any],
    name: str,
    change: Callable[[Any], Any],
    says: str,
) -> None:
    error = refusal(arguments(batch=2) | {name: change(state(2))})
    assert error.argument == name and says in error.allowed


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out", "beta", "A_log", "dt_bias", "cu_seqlens"])
def test_a_misaligned_tensor_is_refused(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any, name: str
) -> None:
    call = arguments(sequences=1)
    odd = call[name].data_ptr() + (8 if name in ("q", "k", "v", "g", "out") else 1)
    error = refusal(call | {name: on_cuda(call[name].as_subclass(torch.Tensor), address=odd)})
    assert error.argument == name and "aligned" in error.allowed
    assert not cuda.launches


def test_gradients_are_refused_only_while_they_are_recorded(arguments: Callable[..., Arguments], cuda: Any) -> None:
    call = arguments()
    call["A_log"].requires_grad_()
    error = refusal(call)
    assert error.argument == "A_log" and "torch.no_grad" in error.remedy
    with torch.no_grad():
        flashkda.fwd(**call)
    assert len(cuda.launches) == 2


@pytest.mark.parametrize("source", ["q", "k", "v", "g"])
def test_out_in_an_inputs_memory_is_refused(arguments: Callable[..., Arguments], cuda: Any, source: str) -> None:
    call = arguments()
    error = refusal(call | {"out": call[source]})
    assert (error.argument, error.value) == ("out", f"in the same memory as {source}")


def test_overlap_is_found_though_the_signature_is_known(arguments: Callable[..., Arguments], cuda: Any) -> None:
    call = arguments()
    flashkda.fwd(**call)
    assert refusal(call | {"out": call["k"]}).argument == "out"
    assert len(cuda.launches) == 2


def test_slices_of_one_fused_projection_are_accepted(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    fused = torch.zeros(1, 40, 2, 5 * 128, dtype=torch.bfloat16)
    slices = dict(zip(("q", "k", "v", "g", "out"), fused.split(128, dim=-1), strict=True))
    flashkda.fwd(**(arguments() | {name: on_cuda(part) for name, part in slices.items()}))
    assert cuda.launches[0].values["q_stride_h"] == 640
    assert cuda.launches[1].values["out"] == fused.data_ptr() + 4 * 256


def test_a_state_may_be_updated_in_place_but_not_shifted(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    pool = torch.zeros(6, 2, 128, 128)
    call = arguments(batch=2)
    same = on_cuda(pool[:2])
    flashkda.fwd(**(call | {"initial_state": same, "final_state": same}))
    flashkda.fwd(**(call | {"initial_state": on_cuda(pool[0:4:2]), "final_state": on_cuda(pool[1:5:2])}))
    assert len(cuda.launches) == 4
    error = refusal(call | {"initial_state": on_cuda(pool[0:2]), "final_state": on_cuda(pool[1:3])})
    assert error.argument == "final_state" and "initial_state itself" in error.allowed


def test_a_state_of_another_dtype_in_the_same_memory_is_refused(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    memory = torch.zeros(2, 128, 128)
    wide = on_cuda(memory[None])
    narrow = on_cuda(memory.view(torch.bfloat16).view(-1)[: 2 * 128 * 128].view(1, 2, 128, 128))
    assert refusal(arguments() | {"initial_state": narrow, "final_state": wide}).argument == "final_state"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda size: torch.zeros(size, dtype=torch.int8), "uint8"),
        (lambda size: torch.zeros(1, size, dtype=torch.uint8), "1-D"),
        (lambda size: torch.zeros(2 * size, dtype=torch.uint8)[::2], "contiguous"),
        (lambda size: torch.zeros(size - 13601, dtype=torch.uint8), f"at least {3 * 2 * 13600} bytes"),
    ],
)
def test_a_wrong_workspace_is_refused(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any, make: Callable[[int], Any], says: str
) -> None:
    size = 3 * 2 * 13600
    error = refusal(arguments() | {"workspace": on_cuda(make(size))})
    assert error.argument == "workspace" and says in error.allowed


def test_a_misaligned_workspace_is_refused(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    memory = torch.zeros(100000, dtype=torch.uint8)
    error = refusal(arguments() | {"workspace": on_cuda(memory, address=memory.data_ptr() + 4)})
    assert (error.argument, error.allowed) == ("workspace", "16-byte aligned")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("state_indices", lambda t: t.to(torch.int16), "int32 or int64"),
        ("state_indices", lambda t: t[:2], "[3] ([N])"),
        ("state_indices", lambda t: t[:, None], "[3] ([N])"),
        ("state_indices", lambda t: t.repeat_interleave(2)[::2], "contiguous"),
        ("state_indices", lambda t: t.as_subclass(torch.Tensor), "a tensor on a CUDA device"),
        ("state_indices", lambda t: [0, 1, 2], "a torch.Tensor or None"),
        ("has_initial_state", lambda t: t.to(torch.uint8), "bool"),
        ("has_initial_state", lambda t: t.repeat(2), "[3] ([N])"),
        ("has_initial_state", lambda t: t.repeat_interleave(2)[::2], "contiguous"),
        ("checkpoint_cu_starts", lambda t: t.float(), "int32 or int64"),
        ("checkpoint_cu_starts", lambda t: t[:3], "[4] ([N + 1])"),
        ("checkpoint_cu_starts", lambda t: None, "given where checkpoints and cu_seqlens are"),
        ("checkpoints", lambda t: t.half(), "bfloat16 or float32"),
        ("checkpoints", lambda t: t[0], "[C, 2, 128, 128] ([C, H, V, K])"),
        ("checkpoints", lambda t: t[:, :1], "[C, 2, 128, 128] ([C, H, V, K])"),
        ("checkpoints", lambda t: t.transpose(2, 3), "contiguous in its last three dimensions"),
        ("checkpoints", lambda t: t[:1].expand(7, -1, -1, -1), "at least 32768"),
        ("initial_state", lambda t: t[:, :1], "[slots, 2, 128, 128] ([slots, H, V, K])"),
        ("final_state", lambda t: t[0], "[slots, 2, 128, 128] ([slots, H, V, K])"),
        ("final_state", lambda t: t[:1].expand(6, -1, -1, -1), "at least 32768"),
        ("checkpoint_every", lambda every: None, "a positive multiple of 16"),
        ("checkpoint_every", lambda every: 24, "a positive multiple of 16"),
        ("checkpoint_every", lambda every: 0, "a positive multiple of 16"),
        ("checkpoint_every", lambda every: 64.0, "a positive multiple of 16"),
        ("checkpoint_every", lambda every: 2**31, "at most 2147483647"),
    ],
)
def test_a_wrong_argument_of_pools_or_checkpoints_is_refused(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], cuda: Any, name: str,
    change: Callable[[Any], Any], says: str,
) -> None:  # fmt: skip
    call = arguments(sequences=3) | pools()
    flashkda.fwd(**call)
    error = refusal(call | {name: change(call[name])})
    assert error.argument == name and says in error.allowed
    assert len(cuda.launches) == 2


@pytest.mark.parametrize(
    ("absent", "name", "says"),
    [
        (("initial_state", "final_state", "has_initial_state"), "state_indices", "without a state"),
        (("initial_state",), "has_initial_state", "without initial_state"),
        (("checkpoints", "checkpoint_cu_starts"), "checkpoint_every", "64 without checkpoints"),
        (("checkpoints", "checkpoint_every"), "checkpoint_cu_starts", "without checkpoints"),
    ],
)
def test_an_argument_without_the_one_it_belongs_to_is_refused(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], cuda: Any, absent: tuple[str, ...],
    name: str, says: str,
) -> None:  # fmt: skip
    error = refusal(arguments(sequences=3) | pools() | dict.fromkeys(absent))
    assert error.argument == name and says in error.value
    assert not cuda.launches


@pytest.mark.parametrize("name", ["state_indices", "checkpoints", "checkpoint_cu_starts", "final_state"])
def test_a_misaligned_pool_argument_is_refused(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any,
    name: str,
) -> None:  # fmt: skip
    call = arguments(sequences=3) | pools()
    odd = on_cuda(call[name].as_subclass(torch.Tensor), address=call[name].data_ptr() + 2)
    error = refusal(call | {name: odd})
    assert error.argument == name and "aligned" in error.allowed
    assert not cuda.launches


def test_checkpoints_overlap_nothing_else(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    call = arguments(sequences=3) | pools() | {"workspace": on_cuda(torch.zeros(200000, dtype=torch.uint8))}
    tensors = [name for name, value in call.items() if isinstance(value, torch.Tensor) and name != "checkpoints"]
    assert len(tensors) == 15
    for name in tensors:
        moved = {one: on_cuda(call[one].as_subclass(torch.Tensor), address=1 << 50) for one in ("checkpoints", name)}
        error = refusal(call | moved)
        assert {error.argument, error.value.split()[-1]} == {"checkpoints", name}
    assert not cuda.launches


def test_pools_are_one_tensor_or_apart(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], state: Callable[..., Any], cuda: Any
) -> None:
    pool = state(6)
    call = arguments(sequences=3) | pools()
    flashkda.fwd(**(call | {"initial_state": pool, "final_state": pool}))
    assert len(cuda.launches) == 2
    assert refusal(call | {"initial_state": pool[:5], "final_state": pool}).argument == "final_state"


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("name", ["q", "beta", "A_log", "dt_bias", "out", "initial_state", "checkpoints"])
def test_a_lazily_negated_view_is_refused_whatever_is_known(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], cuda: Any, name: str, calls: int
) -> None:
    call = arguments(sequences=3) | pools()
    for _ in range(calls):
        flashkda.fwd(**call)
    error = refusal(call | {name: torch._neg_view(call[name])})
    assert error.argument == name and "lazy view" in error.value
    assert len(cuda.launches) == 2 * calls


def test_an_argument_error_survives_pickling(artifact_folder: Path) -> None:
    error = ArgumentError("q", "None", "a tensor", "pass one")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "q is None, but must be a tensor: pass one"
    refused = NoArtifactError("prepare", (("a.cubin", ("has bv 1",)),))
    assert str(pickle.loads(pickle.dumps(refused))) == str(refused)


# --- launches ------------------------------------------------------------------------------------


def test_a_call_is_two_launches_with_the_tensors_addresses(
    arguments: Callable[..., Arguments], state: Callable[..., Any], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    call = arguments(seqlen=40, heads=2, sequences=3)
    workspace = on_cuda(torch.zeros(flashkda.workspace_size(40, 2, 3), dtype=torch.uint8))
    states = {"initial_state": state(3, dtype=torch.bfloat16), "final_state": state(3)}
    call |= states | {"workspace": workspace, "lower_bound": -4.0, "scale": 0.25}
    assert flashkda.fwd(**call) is None
    prepare, recurrence = cuda.launches
    assert (prepare.entry, recurrence.entry) == ("entry_prepare_a", "entry_recurrence_bv16")
    for name in ("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "workspace"):
        assert prepare.values[name] == call[name].data_ptr()
    for name in ("v", "out", "workspace", "initial_state", "final_state", "cu_seqlens"):
        assert recurrence.values[name] == call[name].data_ptr()
    assert prepare.values["scale"] == 0.25
    assert prepare.values["gate_scale"] == struct.unpack("<f", struct.pack("<f", -4.0 * 1.4426950408889634))[0]
    assert (recurrence.values["initial_dtype"], recurrence.values["final_dtype"]) == (1, 2)
    assert (recurrence.values["total_tiles"], recurrence.values["num_seqs"]) == (40 // 16 + 3, 3)
    assert prepare.config["gridDimX"] == 2 * -(-5 // 4)
    assert recurrence.config["gridDimX"] == 3 * 2 * 8
    assert (recurrence.config["blockDimX"], recurrence.config["sharedMemBytes"]) == (160, 90016)


def test_absent_tensors_are_null_and_the_workspace_is_allocated(arguments: Callable[..., Arguments], cuda: Any) -> None:
    flashkda.fwd(**arguments())
    prepare, recurrence = cuda.launches
    assert prepare.values["cu_seqlens"] == 0
    for name in ("initial_state", "final_state", "state_indices", "has_initial_state", "checkpoints"):
        assert recurrence.values[name] == 0
    assert recurrence.values["checkpoint_cu_starts"] == 0
    assert prepare.values["workspace"] == recurrence.values["workspace"] != 0


@pytest.mark.parametrize(("heads", "bv"), [(2, None), (20, None), (2, 64), (20, 16)])
def test_the_record_order_of_a_call_is_that_of_its_prepare_kernel(
    arguments: Callable[..., Arguments], cuda: Any, heads: int, bv: int | None
) -> None:
    from flashkda.arguments import TENSORS
    from flashkda.call import record_order

    call = arguments(heads=heads)
    flashkda.fwd(**call, bv=bv)
    tensors = [call.get(name) for name in TENSORS]
    assert cuda.launches[0].entry == f"entry_prepare_{record_order(tensors, call['scale'], -5.0, bv)}"


def test_pools_and_checkpoints_reach_the_recurrence(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], cuda: Any
) -> None:
    call = arguments(sequences=3) | pools(rows=5)
    flashkda.fwd(**call)
    values = cuda.launches[1].values
    for name in ("initial_state", "final_state", "state_indices", "has_initial_state", "checkpoints"):
        assert values[name] == call[name].data_ptr()
    assert values["checkpoint_cu_starts"] == call["checkpoint_cu_starts"].data_ptr()
    # An index must lie in both pools.
    assert (values["num_slots"], values["num_seqs"], values["num_checkpoints"]) == (5, 3, 7)
    assert (values["state_indices_is_int64"], values["checkpoint_starts_is_int64"]) == (0, 1)
    assert (values["checkpoint_dtype"], values["checkpoint_chunks"]) == (2, 4)
    assert values["checkpoint_stride_n"] == 2 * 128 * 128


def test_checkpoints_of_a_fixed_length_call_need_no_starts(
    arguments: Callable[..., Arguments], state: Callable[..., Any], cuda: Any
) -> None:
    flashkda.fwd(**arguments(batch=2), checkpoints=state(6, dtype=torch.bfloat16), checkpoint_every=16)
    values = cuda.launches[1].values
    assert (values["checkpoint_cu_starts"], values["checkpoint_dtype"], values["checkpoint_chunks"]) == (0, 1, 1)


def test_slots_and_checkpoints_may_be_far_apart(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any
) -> None:
    rows = torch.zeros(4, 5, 2, 128, 128)
    names = ("initial_state", "final_state", "checkpoints")
    parts = {name: on_cuda(part) for name, part in zip(names, rows.unbind(1), strict=False)}
    flashkda.fwd(**(arguments(sequences=3) | pools() | parts))
    values = cuda.launches[1].values
    strides = [values[f"{name}_stride_n"] for name in ("initial", "final", "checkpoint")]
    assert strides == [5 * 2 * 128 * 128] * 3


def test_each_call_passes_its_own_addresses_and_numbers(arguments: Callable[..., Arguments], cuda: Any) -> None:
    first, second, longer = arguments(), arguments(), arguments(seqlen=41)
    for call in (first, second, longer, first):
        flashkda.fwd(**call)
    starts = [launch.values["q"] for launch in cuda.launches[::2]]
    assert starts == [call["q"].data_ptr() for call in (first, second, longer, first)]
    assert [launch.values["seqlen"] for launch in cuda.launches[::2]] == [40, 40, 41, 40]
    assert len(cuda.loaded) == 2


def test_every_argument_that_matters_is_part_of_the_signature(
    arguments: Callable[..., Arguments], state: Callable[..., Any], cuda: Any
) -> None:
    call = arguments()
    flashkda.fwd(**call)
    for change in ({"scale": 0.5}, {"lower_bound": -1.0}, {"bv": 128}, {"final_state": state()}):
        flashkda.fwd(**(call | change))
    values = [launch.values for launch in cuda.launches]
    assert values[2]["scale"] == 0.5
    assert values[4]["gate_scale"] == pytest.approx(-1.442695)
    assert [launch.entry for launch in cuda.launches[6:8]] == ["entry_prepare_b", "entry_recurrence_bv128"]
    assert values[9]["final_dtype"] == 2


def test_a_zeros_sign_does_not_depend_on_earlier_calls(arguments: Callable[..., Arguments], cuda: Any) -> None:
    for zero in (-0.0, 0.0):
        flashkda.fwd(**(arguments() | {"scale": zero, "lower_bound": zero}))
    values = [launch.values for launch in cuda.launches[::2]]
    assert {str(one[name]) for one in values for name in ("scale", "gate_scale")} == {"0.0"}


def test_the_distance_of_checkpoints_is_part_of_the_signature(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], cuda: Any
) -> None:
    call = arguments(sequences=3) | pools()
    for every in (64, 64, 64, 16, 64):
        flashkda.fwd(**(call | {"checkpoint_every": every}))
    assert [launch.values["checkpoint_chunks"] for launch in cuda.launches[1::2]] == [4, 4, 4, 1, 4]


def test_empty_calls_launch_nothing_or_only_write_states(
    arguments: Callable[..., Arguments], state: Callable[..., Any], cuda: Any
) -> None:
    for shape in ({"batch": 0}, {"heads": 0}, {"seqlen": 0}):
        flashkda.fwd(**arguments(**shape))
    assert not cuda.launches
    flashkda.fwd(**arguments(seqlen=0), final_state=state())
    (launch,) = cuda.launches
    assert launch.entry.startswith("entry_recurrence") and launch.values["seqlen"] == 0


def test_the_current_stream_is_used_and_torchs_default_is_the_legacy_one(
    arguments: Callable[..., Arguments], cuda: Any
) -> None:
    flashkda.fwd(**arguments(ordinal=0))
    flashkda.fwd(**arguments(ordinal=1))
    assert [launch.config["hStream"] for launch in cuda.launches] == [1, 1, 77, 77]


def test_launches_run_in_the_tensors_context_and_the_callers_is_restored(
    arguments: Callable[..., Arguments], cuda: Any
) -> None:
    for current in (0, 100, 101, 555):
        cuda.contexts = [current]
        for ordinal in (0, 1):
            cuda.launches.clear()
            flashkda.fwd(**arguments(ordinal=ordinal))
            assert [launch.context for launch in cuda.launches] == [100 + ordinal] * 2
            assert cuda.contexts == [current]


def test_the_callers_context_is_restored_after_a_failed_launch(arguments: Callable[..., Arguments], cuda: Any) -> None:
    call = arguments(ordinal=1)
    flashkda.fwd(**call)
    cuda.launch_status = type(cuda.launch_status).CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(DriverError, match=r"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: the description"):
        flashkda.fwd(**call)
    assert cuda.contexts == [0]


def test_a_device_without_an_artifact_and_an_old_driver_are_told_apart(
    arguments: Callable[..., Arguments], cuda: Any
) -> None:
    cuda.version = 12040
    cuda.devices[0] = {"major": 8, "minor": 0, "sm_count": 108}
    with pytest.raises(NoArtifactError, match=re.escape("recurrence (numerics flashkda, bv 16): no kernel for")):
        flashkda.fwd(**arguments())
    with pytest.raises(DriverError, match=r"too old for recurrence\.flashkda\.bv16\.sm_100a\.cubin.*12\.4.*12\.8"):
        flashkda.fwd(**arguments(ordinal=1))


def test_a_changed_cubin_is_refused_at_its_first_load(
    arguments: Callable[..., Arguments], artifact_folder: Path, cuda: Any
) -> None:
    (artifact_folder / "recurrence.flashkda.bv16.sm_90a.cubin").write_bytes(b"\x7fELF other")
    with pytest.raises(ArtifactError, match=r"recurrence\.flashkda\.bv16\.sm_90a\.cubin"):
        flashkda.fwd(**arguments())
    assert not cuda.loaded and not cuda.launches and cuda.contexts == [0]
    flashkda.fwd(**arguments(), bv=64)
    assert len(cuda.launches) == 2


def flipped(cubin: Path) -> None:
    data = bytearray(cubin.read_bytes())
    data[len(data) // 2] ^= 1
    cubin.write_bytes(data)


@pytest.mark.parametrize("first", ["fwd", "preload"])
@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda cubin: os.truncate(cubin, cubin.stat().st_size - 1),
        lambda cubin: os.truncate(cubin, 0),
        lambda cubin: cubin.unlink(),
    ],
    ids=["flipped", "truncated", "empty", "missing"],
)
def test_beside_a_damaged_recurrence_not_even_a_sound_prepare_is_loaded(
    arguments: Callable[..., Arguments], artifact_folder: Path, cuda: Any, damage: Callable[[Path], None], first: str
) -> None:
    cubin = artifact_folder / "recurrence.flashkda.bv16.sm_90a.cubin"
    sound = cubin.read_bytes()
    damage(cubin)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=re.escape(cubin.name)):
            flashkda.preload(0) if first == "preload" else flashkda.fwd(**arguments())
        assert not cuda.loaded and not cuda.finished and not cuda.launches and cuda.contexts == [0]
    cubin.write_bytes(sound)
    flashkda.fwd(**arguments())
    assert len(cuda.loaded) == len(cuda.launches) == 2


def test_a_first_call_within_a_capture_is_refused_and_works_after_preload(
    arguments: Callable[..., Arguments], cuda: Any
) -> None:
    cuda.capturing = 1
    with pytest.raises(DriverError, match=r"flashkda\.preload\(0\)"):
        flashkda.fwd(**arguments())
    assert not cuda.loaded
    flashkda.preload(0)
    loaded = dict(cuda.loaded)
    flashkda.fwd(**arguments())
    assert cuda.loaded == loaded and len(cuda.launches) == 2


def test_a_known_signature_in_another_thread_has_its_own_parameter_block(
    arguments: Callable[..., Arguments], cuda: Any
) -> None:
    calls = [arguments() for _ in range(4)]
    flashkda.fwd(**calls[0])
    cuda.launches.clear()
    real_launch, both_inside = cuda.cuLaunchKernelEx, threading.Barrier(4)

    def launch(config: Any, function: int, addresses: int, extra: int) -> Any:
        # All threads have written their block before any of them is read.
        both_inside.wait(timeout=20)
        return real_launch(config, function, addresses, extra)

    from flashkda import kernels

    for kernel in kernels._loaded.values():
        kernel._launch = launch
    threads = [threading.Thread(target=flashkda.fwd, kwargs=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prepared = [run.values["q"] for run in cuda.launches if "prepare" in run.entry]
    assert sorted(prepared) == sorted(call["q"].data_ptr() for call in calls)


def test_the_number_of_kept_signatures_is_bounded(
    arguments: Callable[..., Arguments], cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import api

    monkeypatch.setattr(api, "_KEPT_SIGNATURES", 3)
    for seqlen in (1, 2, 3, 4, 5, 1):
        flashkda.fwd(**arguments(seqlen=seqlen))
    assert len(api._calls) == 3
    assert len(cuda.launches) == 12


def test_a_load_and_a_plan_have_one_line_each_at_debug(
    arguments: Callable[..., Arguments], artifact_folder: Path, cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="flashkda"):
        for _ in range(4):  # the later ones have nothing to load and nothing to plan
            flashkda.fwd(**arguments())
        flashkda.fwd(**arguments(seqlen=41))
    size = {file.name: file.stat().st_size for file in artifact_folder.iterdir()}
    prepare, recurrence = "prepare.flashkda.a.sm_90a.cubin", "recurrence.flashkda.bv16.sm_90a.cubin"
    assert caplog.messages == [
        "device 0 (Made-up GPU): BV 16, 32, 64, 128",
        f"loaded {prepare} (entry_prepare_a, {size[prepare]} bytes)",
        f"loaded {recurrence} (entry_recurrence_bv16, {size[recurrence]} bytes)",
        f"planned B=1 T=40 H=2 N=1 on device 0: BV 16, 3 tiles, workspace {3 * 2 * 13600} bytes",
        f"planned B=1 T=41 H=2 N=1 on device 0: BV 16, 3 tiles, workspace {3 * 2 * 13600} bytes",
    ]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_a_kernel_has_one_line_however_many_devices_and_preloads(
    arguments: Callable[..., Arguments], cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.devices[1] = cuda.devices[0]
    with caplog.at_level(logging.DEBUG, logger="flashkda"):
        for ordinal in (0, 1, 0):
            flashkda.preload(ordinal)
        flashkda.fwd(**arguments(ordinal=1))
    assert [message.split()[0] for message in caplog.messages] == ["device", *["loaded"] * 6, "device", "planned"]
    assert len(set(caplog.messages)) == 9


def test_a_call_that_cannot_load_its_kernels_has_no_line_of_a_plan(
    arguments: Callable[..., Arguments], cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capturing = 1
    with caplog.at_level(logging.DEBUG, logger="flashkda"):
        for _ in range(2):
            with pytest.raises(DriverError):
                flashkda.fwd(**arguments())
    assert [message.split()[0] for message in caplog.messages] == ["device"]


# --- what a call allocates -----------------------------------------------------------------------


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch, cuda: Any) -> list[str]:
    """Names of torch's functions and methods that make a tensor's memory, as they are called."""
    from flashkda import call

    call.guards_see_everything()  # once a process, and it makes small CPU tensors
    called: list[str] = []

    def counted(name: str, real: Any) -> Any:
        def count(*given: Any, **named: Any) -> Any:
            called.append(name)
            return real(*given, **named)

        return count

    makers = ("empty", "zeros", "ones", "full", "rand", "tensor", "as", "arange", "from_", "clone", "cat", "stack")
    for name in dir(torch):
        if name.startswith(makers) and inspect.isroutine(getattr(torch, name)):
            monkeypatch.setattr(torch, name, counted(f"torch.{name}", getattr(torch, name)))
    for name in dir(torch.Tensor):
        if name.startswith(("new_", "clone", "contiguous", "to", "cpu", "cuda", "type", "float", "int", "bfloat16")):
            method = getattr(torch.Tensor, name)
            if inspect.isroutine(method):
                monkeypatch.setattr(torch.Tensor, name, counted(f"Tensor.{name}", method))
    return called


def test_what_counts_allocations_sees_them(allocations: list[str]) -> None:
    one = torch.empty(1)
    one.clone()
    one.new_zeros(1)
    torch.empty_like(one)
    one.to(torch.int32)
    assert allocations == ["torch.empty", "Tensor.clone", "Tensor.new_zeros", "torch.empty_like", "Tensor.to"]


def test_with_a_workspace_a_call_allocates_nothing_and_without_one_just_that(
    arguments: Callable[..., Arguments], state: Callable[..., Any], pools: Callable[..., Arguments],
    on_cuda: Callable[..., Any], repeated: Callable[..., None], cuda: Any, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    workspace = on_cuda(torch.zeros(flashkda.workspace_size(40, 2, 3), dtype=torch.uint8))
    one = state()
    calls = [
        arguments(), arguments() | {"initial_state": one, "final_state": one}, arguments(sequences=3) | pools()
    ]  # fmt: skip
    allocations = request.getfixturevalue("allocations")  # after all of this was allocated
    for call in calls:
        repeated(call | {"workspace": workspace})
        assert allocations == []
        repeated(call)
        assert allocations == ["torch.empty"] * 3
        allocations.clear()
    assert len(cuda.launches) == 2 * 3 * 2 * len(calls)


# --- calls that come back ------------------------------------------------------------------------


@pytest.fixture(params=["guarded", "without guards"])
def repeated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a call three times; whether torch's guards then know it is the parameter."""
    from flashkda import api, call

    guarded = request.param == "guarded"
    if not guarded:
        monkeypatch.setattr(call, "guards_see_everything", lambda: False)

    def repeat(arguments: Arguments) -> None:
        for _ in range(3):
            flashkda.fwd(**arguments)
        assert bool(api._recent) == guarded

    return repeat


@pytest.mark.parametrize(
    ("name", "change", "seen"),
    [
        ("q", lambda t: t.new_zeros(1, 40, 2, 256)[..., :128], ("q_stride_h", 256)),
        ("beta", lambda t: t.new_zeros(1, 2, 40).transpose(1, 2), ("beta_stride_h", 40)),
        ("cu_seqlens", lambda t: t.int(), ("cu_seqlens_is_int64", 0)),
        ("cu_seqlens", lambda t: t.repeat(2)[:5], ("num_seqs", 4)),
        ("initial_state", lambda t: t.float(), ("initial_dtype", 2)),
        ("initial_state", lambda t: t[:2], ("num_slots", 2)),
        ("initial_state", lambda t: t.repeat_interleave(2, 0)[::2], ("initial_stride_n", 2 * 2 * 128 * 128)),
        ("initial_state", lambda t: None, ("initial_dtype", 0)),
        ("has_initial_state", lambda t: None, ("has_initial_state", 0)),
        ("checkpoints", lambda t: t.bfloat16(), ("checkpoint_dtype", 1)),
        ("checkpoints", lambda t: t[:4], ("num_checkpoints", 4)),
        ("state_indices", lambda t: t.long(), ("state_indices_is_int64", 1)),
    ],
)
def test_a_changed_tensor_is_not_taken_for_the_known_one(
    arguments: Callable[..., Arguments], pools: Callable[..., Arguments], cuda: Any, repeated: Callable[..., None],
    name: str, change: Callable[[Any], Any], seen: tuple[str, int],
) -> None:  # fmt: skip
    call = arguments(sequences=3) | pools()
    repeated(call)
    before = len(cuda.launches)
    changed = call | {name: change(call[name])}
    if seen[0] == "num_seqs":
        changed |= pools(sequences=4)
    if changed["initial_state"] is None:
        changed["has_initial_state"] = None
    flashkda.fwd(**changed)
    flashkda.fwd(**call)
    values = [cuda.launches[before].values | cuda.launches[before + 1].values, cuda.launches[before + 2].values]
    values[1] |= cuda.launches[before + 3].values
    assert values[0][seen[0]] == seen[1] != values[1][seen[0]]


def test_a_known_call_on_another_device_is_planned_anew(
    arguments: Callable[..., Arguments], cuda: Any, repeated: Callable[..., None]
) -> None:
    repeated(arguments())
    flashkda.fwd(**arguments(ordinal=1))
    assert [launch.context for launch in cuda.launches[-4:]] == [100, 100, 101, 101]
    assert refusal(arguments() | {"dt_bias": arguments(ordinal=1)["dt_bias"]}).argument == "dt_bias"


def test_a_known_tensor_that_comes_to_require_grad_is_refused(
    arguments: Callable[..., Arguments], cuda: Any, repeated: Callable[..., None]
) -> None:
    call = arguments()
    repeated(call)
    call["dt_bias"].requires_grad_()
    assert refusal(call).argument == "dt_bias"
    with torch.no_grad():
        repeated(call)
    assert refusal(call).argument == "dt_bias"
    assert len(cuda.launches) == 12


def test_known_tensors_that_change_in_place_are_seen(
    arguments: Callable[..., Arguments], cuda: Any, repeated: Callable[..., None]
) -> None:
    call = arguments()
    repeated(call)
    call["beta"].resize_(1, 40, 1)
    assert refusal(call).argument == "beta"


def test_states_in_place_and_apart_are_told_apart(
    arguments: Callable[..., Arguments], state: Callable[..., Any], cuda: Any, repeated: Callable[..., None]
) -> None:
    call, one, other = arguments(), state(), state()
    for initial, final in ((one, one), (one, other), (None, one), (one, None), (one, one)):
        repeated(call | {"initial_state": initial, "final_state": final})
        expected = tuple(0 if tensor is None else tensor.data_ptr() for tensor in (initial, final))
        assert {
            (launch.values["initial_state"], launch.values["final_state"]) for launch in cuda.launches[-6:][1::2]
        } == {expected}  # fmt: skip


def test_a_tensor_given_twice_is_accepted_each_time(arguments: Callable[..., Arguments], cuda: Any) -> None:
    call = arguments()
    for _ in range(4):
        flashkda.fwd(**(call | {"k": call["q"]}))
    assert {launch.values["k"] for launch in cuda.launches[::2]} == {call["q"].data_ptr()}
    assert len(cuda.launches) == 8


def test_a_guard_serves_each_mode_and_a_few_signatures(arguments: Callable[..., Arguments], cuda: Any) -> None:
    from flashkda import api

    calls = [arguments(seqlen=seqlen) for seqlen in range(1, 8)]
    for _ in range(2):
        for call in calls:
            flashkda.fwd(**call)
    assert len(api._recent) == 4
    with torch.inference_mode():
        for _ in range(2):
            flashkda.fwd(**calls[-1])
    # Renewed, not added to.
    assert len(api._recent) == 4 and len({id(guard.call) for guard in api._recent}) == 4
    known = api._recent
    with torch.inference_mode():
        flashkda.fwd(**calls[-1])
    assert api._recent is known
    assert len(cuda.launches) == 2 * 17


def test_what_is_kept_of_a_call_holds_no_tensor(arguments: Callable[..., Arguments], cuda: Any) -> None:
    call = arguments()
    for _ in range(3):
        flashkda.fwd(**call)
    kept = weakref.ref(call["v"])
    del call
    gc.collect()
    assert kept() is None


def test_the_number_of_kept_addresses_is_bounded(
    arguments: Callable[..., Arguments], on_cuda: Callable[..., Any], cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashkda import api, call

    monkeypatch.setattr(call, "KEPT_ADDRESSES", 3)
    sound = arguments()
    for step in range(8):
        moved = on_cuda(sound["q"].as_subclass(torch.Tensor), address=(1 << 50) + 16 * step)
        flashkda.fwd(**(sound | {"q": moved}))
    (kept,) = api._calls.values()
    assert 0 < len(kept.examined) <= 3
    assert [launch.values["q"] for launch in cuda.launches[::2]] == [(1 << 50) + 16 * step for step in range(8)]


# --- preload and workspace_size ------------------------------------------------------------------


def test_preload_finishes_every_kernel_of_the_device_once(artifact_folder: Path, cuda: Any) -> None:
    flashkda.preload(0)
    flashkda.preload(0)
    assert sorted(cuda.loaded.values()) == [
        "entry_prepare_a", "entry_prepare_b", "entry_recurrence_bv128", "entry_recurrence_bv16",
        "entry_recurrence_bv32", "entry_recurrence_bv64",
    ]  # fmt: skip
    assert sorted(cuda.finished) == sorted(cuda.loaded)
    assert sorted(cuda.shared.values()) == [1000, 1000, 90016, 90032, 90064, 90128]
    assert cuda.contexts == [0]


def test_one_loaded_kernel_serves_two_devices_of_one_kind(artifact_folder: Path, cuda: Any) -> None:
    cuda.devices[1] = cuda.devices[0]
    flashkda.preload(0)
    flashkda.preload("cuda:1")
    assert len(cuda.loaded) == 6
    assert {device for _, device in cuda.shared} == {0, 1}


def test_a_driver_without_function_loading_is_not_asked_for_it(artifact_folder: Path, cuda: Any) -> None:
    cuda.version = 12020
    flashkda.preload(0)
    assert len(cuda.loaded) == 6 and not cuda.finished


def test_preload_leaves_nothing_for_the_first_call_to_import(artifact_folder: Path) -> None:
    code = (
        "import sys, torch, flashkda\n"
        "from types import SimpleNamespace\n"
        "import flashkda.kernels as kernels, flashkda.driver as driver\n"
        "driver.get_driver = lambda: SimpleNamespace(device_count=lambda: 1)\n"
        "variants = SimpleNamespace(artifacts=tuple)\n"
        "kernels.device_kernels = lambda ordinal: SimpleNamespace(variants=variants, ready=lambda *given: None)\n"
        "flashkda.preload(0)\n"
        "import flashkda.call as call\n"
        "print(call.guards_see_everything.cache_info().currsize, 'flashkda.arguments' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(flashkda.__file__).parents[1])},
    )  # fmt: skip
    assert result.stdout.split() == ["1", "True"]


@pytest.mark.parametrize("device", ["cpu", "nonsense"])
def test_preload_looks_at_its_argument_before_the_driver(cuda: Any, device: str) -> None:
    with pytest.raises(ArgumentError):
        flashkda.preload(device)
    assert get_driver.cache_info().currsize == 0


@pytest.mark.parametrize("device", [2, -1, "cpu", "nonsense", "cuda:9"])
def test_preload_refuses_what_is_no_visible_device(artifact_folder: Path, cuda: Any, device: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        flashkda.preload(device)
    assert caught.value.argument == "device"


def test_workspace_size_is_that_of_the_packed_layout(artifact_folder: Path) -> None:
    assert flashkda.workspace_size(8192, 96) == (512 + 1) * 96 * 13600
    assert flashkda.workspace_size(0, 4, 2) == 2 * 4 * 13600
    assert flashkda.workspace_size(np.int64(0), np.int32(4), 2) == 2 * 4 * 13600  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (16, 1.0, 1), (16, 1, "1"), (16, True, 1)])
def test_workspace_size_refuses_what_is_no_size(artifact_folder: Path, sizes: Any) -> None:
    with pytest.raises(ArgumentError):
        flashkda.workspace_size(*sizes)


def test_launch_failures_name_the_kernel(arguments: Callable[..., Arguments], cuda: Any) -> None:
    cuda.launch_status = type(cuda.launch_status).CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(DriverError, match=r"launch of prepare\.flashkda\.a\.sm_90a\.cubin with 2 CTAs"):
        flashkda.fwd(**arguments())
