"""flash-linear-attention's own `chunk_kda` runs our kernels, and returns what `flashkda.fwd` writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import Shape, call, make_tensors  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import flashkda  # noqa: E402
from flashkda.alias import FOLDER  # noqa: E402
from flashkda.bits import same_bits  # noqa: E402
from flashkda.kernels import device_kernels  # noqa: E402

pytestmark = pytest.mark.gpu

FIXED = Shape(T=333, H=3, B=2, seed=11)
PACKED = Shape(T=431, H=2, cu_seqlens=(0, 130, 130, 147, 431), seed=12)
STRIDED = Shape(T=200, H=4, fused=True, seed=13)
STATES = [("none", "none"), ("none", "fp32"), ("fp32", "none"), ("bf16", "fp32"), ("fp32", "fp32")]


@pytest.fixture(scope="module")
def chunk_kda(device):
    kda = pytest.importorskip("fla.ops.kda", reason="flash-linear-attention cannot be imported: install flashkda[fla]")
    try:
        flashkda.install_as_flash_kda()
    except flashkda.AliasError as error:
        pytest.skip(str(error))
    yield kda.chunk_kda
    sys.path.remove(FOLDER)
    del sys.modules["flash_kda"]


@pytest.fixture(autouse=True)
def usual_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLA_FLASH_KDA", raising=False)


@pytest.fixture(scope="module")
def kernels_of(device) -> Callable[[Callable[[], object]], list[str]]:
    """Names of the kernels that a function launches, in order, as the profiler saw them."""

    def names(run: Callable[[], object]) -> list[str]:
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize(device)
        on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        ordered = sorted(on_device, key=lambda event: event.time_range.start)
        return [event.name for event in ordered if not event.name.startswith(("Memcpy", "Memset"))]

    one = torch.ones(1000, device=device)
    if not names(lambda: one * 2):
        pytest.skip("torch's profiler sees no kernels here")
    return names


def keywords(shape: Shape, tensors) -> dict[str, object]:
    return {
        **{name: tensors[name] for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log")},
        "dt_bias": tensors["dt_bias"].flatten(),
        "lower_bound": shape.lower_bound,
        "output_final_state": shape.final != "none",
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "state_v_first": True,
    }


@pytest.mark.parametrize("shape", [FIXED, PACKED, STRIDED], ids=["fixed", "packed", "fused_projection"])
def test_it_launches_our_two_kernels_and_nothing_else(shape: Shape, device, chunk_kda, kernels_of) -> None:
    shape = replace(shape, initial="bf16", final="fp32")
    tensors = make_tensors(shape, device)
    variants = device_kernels(device.index).variants
    (prepare,) = {artifact.entry for artifact in variants.prepare.values()}
    (recurrence,) = {artifact.entry for artifact in variants.recurrence.values()}
    with torch.inference_mode():
        chunk_kda(**keywords(shape, tensors))
        launched = kernels_of(lambda: chunk_kda(**keywords(shape, tensors)))
    assert launched == [prepare, recurrence]


@pytest.mark.parametrize("states", STATES, ids=["-to-".join(states) for states in STATES])
@pytest.mark.parametrize("shape", [FIXED, PACKED, STRIDED], ids=["fixed", "packed", "fused_projection"])
def test_its_results_are_those_of_fwd(shape: Shape, states, device, record, chunk_kda) -> None:
    shape = replace(shape, initial=states[0], final=states[1])
    tensors = make_tensors(shape, device)
    ours = call(shape, tensors, record, None)
    with torch.inference_mode():
        out, final_state = chunk_kda(**keywords(shape, tensors))
    assert same_bits(out, ours.out)
    assert (final_state is None) == (ours.final_state is None)
    if final_state is not None:
        assert same_bits(final_state, ours.final_state)


def test_int32_cu_seqlens_and_no_grad_do_as_well(device, record, chunk_kda) -> None:
    shape = replace(PACKED, initial="fp32", final="fp32", cu_dtype=torch.int32)
    tensors = make_tensors(shape, device)
    ours = call(shape, tensors, record, None)
    with torch.no_grad():
        out, final_state = chunk_kda(**keywords(shape, tensors))
    assert same_bits(out, ours.out) and same_bits(final_state, ours.final_state)
