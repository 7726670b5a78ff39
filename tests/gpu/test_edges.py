"""Edges: empty calls, poison, wrong cu_seqlens, bad arguments, streams and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import FILL, STATE_DTYPES, Shape, assert_same, call, filled, make_out, make_tensors  # noqa: E402

import flashkda  # noqa: E402
from flashkda.bits import same_bits  # noqa: E402
from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

GUARD = 4096
PACKED = Shape(T=90, H=3, cu_seqlens=(2, 23, 23, 70, 85), seed=5)


def untouched(tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == FILL).all())


@pytest.mark.parametrize("initial", ["none", "bf16", "fp32"])
@pytest.mark.parametrize("final", ["none", "bf16", "fp32"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(T=0, H=2, B=3),
        Shape(T=0, H=2, cu_seqlens=(0, 0, 0)),
        Shape(T=40, H=2, cu_seqlens=(0, 0, 0)),
        Shape(T=40, H=2, cu_seqlens=(40, 40), cu_dtype=torch.int32),
    ],
    ids=["fixed", "packed", "packed_with_tokens", "at_the_end"],
)
def test_without_a_token_final_state_is_the_initial_one(shape: Shape, initial, final, device, record, all_bv) -> None:
    shape = replace(shape, initial=initial, final=final)
    tensors = make_tensors(shape, device)
    for bv in all_bv:
        written = call(shape, tensors, record, bv)
        assert untouched(written.out)
        if written.final_state is not None:
            state = tensors["initial_state"]
            rounded = torch.zeros_like(written.final_state) if state is None else state.to(torch.bfloat16)
            assert same_bits(written.final_state, rounded.to(written.final_state.dtype))


@pytest.mark.parametrize("shape", [Shape(T=5, H=2, B=0), Shape(T=5, H=0), Shape(T=0, H=0, B=0)], ids=str)
def test_without_a_batch_or_a_head_nothing_happens(shape: Shape, device, record) -> None:
    written = call(shape, make_tensors(shape, device), record, None)
    torch.cuda.synchronize(device)
    assert written.out.numel() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_poison_stays_in_its_sequence_and_head(name: str, value: float, device, record, all_bv) -> None:
    clean_tensors = make_tensors(PACKED, device)
    clean = call(PACKED, clean_tensors, record, None)
    # In the tail overlap, in the middle, at both ends of a sequence, and in tokens of no sequence.
    for token, head in ((24, 0), (40, 1), (23, 2), (69, 0), (70, 1), (0, 1), (87, 2)):
        tensors = {**clean_tensors, name: clean_tensors[name].clone()}
        tensors[name][0, token, head] = value
        for bv in all_bv:
            written = call(PACKED, tensors, record, bv)
            for number, (start, end) in enumerate(PACKED.sequences):
                for other in range(PACKED.H):
                    if start <= token < end and other == head:
                        continue
                    assert same_bits(written.out[0, start:end, other], clean.out[0, start:end, other])
                    assert same_bits(written.final_state[number, other], clean.final_state[number, other])
            assert untouched(written.out[0, :2]) and untouched(written.out[0, 85:])


def test_poison_in_q_stays_in_its_token(device, record) -> None:
    tensors = make_tensors(PACKED, device)
    clean = call(PACKED, tensors, record, None)
    tensors["q"] = tensors["q"].clone()
    tensors["q"][0, 40, 1, 7] = float("nan")
    written = call(PACKED, tensors, record, None)
    assert same_bits(written.final_state, clean.final_state)
    differs = (written.out.view(torch.int16) != clean.out.view(torch.int16))[0].any(-1).nonzero().tolist()
    assert differs == [[40, 1]]


def test_memory_full_of_nan_is_no_input(device, record, all_bv) -> None:
    for shape in (PACKED, Shape(T=37, H=2, B=2, initial="none", final="fp32")):
        tensors = make_tensors(shape, device)
        expected = call(shape, tensors, record, None)
        size = flashkda.workspace_size(shape.B * shape.T, shape.H, len(shape.sequences))
        for bv in all_bv:
            nan = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
            assert_same(call(shape, tensors, record, bv, workspace=nan), expected)


WRONG = {
    "decreasing": (0, 60, 20, 90),
    "negative": (-30, 10, 40, 90),
    "all_negative": (-9, -7, -5, -3),
    "past_the_end": (0, 40, 90, 5000),
    "far_past_the_end": (0, 40, 2**31 - 1, 2**31 - 1),
    "starts_past_the_end": (1000, 2000, 3000, 4000),
    "reversed": (90, 60, 30, 0),
    "extremes": (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1),
    "beyond_int32": (0, 2**33 + 40, 2**62, -(2**62)),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_cu_seqlens_write_nothing_outside(kind: str, dtype, device, record, all_bv) -> None:
    if dtype == torch.int32 and kind == "beyond_int32":
        pytest.skip("not an int32")
    good = Shape(T=90, H=2, cu_seqlens=(0, 30, 61, 90), cu_dtype=dtype, seed=9)
    tensors = make_tensors(good, device)
    expected = call(good, tensors, record, None)
    wrong = {**tensors, "cu_seqlens": torch.tensor(WRONG[kind], dtype=dtype, device=device)}
    sizes = {
        "out": tensors["q"].numel() * 2,
        "final_state": 3 * good.H * HEAD_DIM * HEAD_DIM * 4,
        # Exactly what the call needs, not the bound: a write past it must show.
        "workspace": good.H * good.tiles * record.bytes,
    }
    for bv in all_bv:
        # Neighbours in one buffer, so that an access past one tensor lands in a guard band and not in free memory.
        buffer = filled(sum(sizes.values()) + GUARD * (len(sizes) + 1), device)
        views, bands, offset = {}, [], 0
        for name, size in sizes.items():
            bands.append(buffer[offset : offset + GUARD])
            views[name] = buffer[offset + GUARD : offset + GUARD + size]
            offset += GUARD + size
        bands.append(buffer[offset:])
        flashkda.fwd(
            *(wrong[name] for name in ("q", "k", "v", "g", "beta")), good.scale,
            views["out"].view(torch.bfloat16).view_as(wrong["q"]), wrong["A_log"], wrong["dt_bias"], good.lower_bound,
            initial_state=wrong["initial_state"],
            final_state=views["final_state"].view(torch.float32).view(3, good.H, HEAD_DIM, HEAD_DIM),
            cu_seqlens=wrong["cu_seqlens"], workspace=views["workspace"], bv=bv,
        )  # fmt: skip
        torch.cuda.synchronize(device)
        assert all(untouched(band) for band in bands)
        assert_same(call(good, tensors, record, bv), expected)


def test_a_call_changes_none_of_its_inputs(device, record, all_bv) -> None:
    for shape in (PACKED, replace(PACKED, fused=True, pooled=True, initial="fp32"), Shape(T=50, H=2, B=2)):
        tensors = make_tensors(shape, device)
        before = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        for bv in all_bv:
            call(shape, tensors, record, bv)
        for name, copy in before.items():
            assert torch.equal(tensors[name], copy), name


def test_in_place_state_equals_a_separate_one(device, record, all_bv) -> None:
    for dtype in STATE_DTYPES:
        shape = replace(PACKED, initial=dtype, final=dtype)
        tensors = make_tensors(shape, device)
        for bv in all_bv:
            expected = call(shape, tensors, record, bv)
            assert_same(call(replace(shape, in_place=True), tensors, record, bv), expected)


def test_neighbours_of_strided_results_stay_as_they_were(device, record) -> None:
    shape = replace(PACKED, fused=True, pooled=True)
    tensors = make_tensors(shape, device)
    written = call(shape, tensors, record, None)
    whole = written.out.as_strided((shape.T, shape.H * HEAD_DIM + 40), (shape.H * HEAD_DIM + 40, 1))
    assert untouched(whole[:, shape.H * HEAD_DIM :])
    state = written.final_state
    pool = state.as_strided(
        (len(shape.sequences), 2, *state.shape[1:]), (state.stride(0), state.stride(0) // 2, *state.stride()[1:])
    )
    assert untouched(pool[:, 1])


def bad_calls(tensors):
    """Arguments that must be refused: name, changes to a good call."""
    yield "q", {"q": tensors["q"].float()}
    yield "k", {"k": tensors["k"][:, :-1]}
    yield "v", {"v": tensors["v"].cpu()}
    yield "g", {"g": tensors["g"].transpose(2, 3).contiguous().transpose(2, 3)}
    yield "beta", {"beta": tensors["beta"].float()}
    yield "A_log", {"A_log": tensors["A_log"][:-1]}
    yield "dt_bias", {"dt_bias": tensors["dt_bias"].half()}
    yield "initial_state", {"initial_state": tensors["initial_state"][1:]}
    yield "cu_seqlens", {"cu_seqlens": tensors["cu_seqlens"].float()}
    yield "scale", {"scale": float("nan")}
    yield "lower_bound", {"lower_bound": 1.0}
    yield "bv", {"bv": 48}
    yield "workspace", {"workspace": filled(16, tensors["q"].device)}
    shifted = filled(tensors["q"].numel() * 2 + 16, tensors["q"].device)[2:-14].view(torch.bfloat16)
    yield "q", {"q": shifted.view_as(tensors["q"])}


def test_refused_arguments_leave_the_context_alive(device, record) -> None:
    tensors = make_tensors(PACKED, device)
    expected = call(PACKED, tensors, record, None)
    for name, changes in bad_calls(tensors):
        good = {"scale": PACKED.scale, "lower_bound": PACKED.lower_bound, "out": make_out(PACKED, device)}
        arguments = {**tensors, **good, **changes}
        with pytest.raises(flashkda.ArgumentError) as caught:
            flashkda.fwd(**arguments)
        assert caught.value.argument == name
        torch.cuda.synchronize(device)
        assert untouched(arguments["out"])
    assert_same(call(PACKED, tensors, record, None), expected)


def test_a_call_runs_on_the_callers_stream(device, record) -> None:
    tensors = make_tensors(PACKED, device)
    expected = call(PACKED, tensors, record, None)
    late = {**tensors, "v": torch.full_like(tensors["v"], 7.0)}
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        # Long enough that work on any other stream would see the v that is not there yet.
        torch.cuda._sleep(50_000_000)
        late["v"].copy_(tensors["v"])
        written = call(PACKED, late, record, None)
    stream.synchronize()
    assert_same(written, expected)


def test_calls_on_several_streams_do_not_disturb_each_other(device, record, all_bv) -> None:
    shapes = [Shape(T=700, H=4, seed=seed) for seed in range(4)]
    tensors = [make_tensors(shape, device) for shape in shapes]
    expected = [call(shape, t, record, None) for shape, t in zip(shapes, tensors, strict=True)]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in shapes]
    written = []
    for repeat in range(6):
        for shape, t, stream in zip(shapes, tensors, streams, strict=True):
            with torch.cuda.stream(stream):
                written.append(call(shape, t, record, all_bv[repeat % len(all_bv)]))
    torch.cuda.synchronize(device)
    for index, result in enumerate(written):
        assert_same(result, expected[index % len(shapes)])


def test_a_call_is_captured_in_a_graph_after_preload(device, record, all_bv) -> None:
    flashkda.preload(device.index)
    for bv in all_bv:
        tensors = make_tensors(PACKED, device)
        expected = call(PACKED, tensors, record, bv)
        v = tensors["v"].clone()
        tensors["v"].zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            written = call(PACKED, tensors, record, bv)
        tensors["v"].copy_(v)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize(device)
            assert_same(written, expected)


def test_without_a_workspace_the_call_allocates_its_own(device, record) -> None:
    tensors = make_tensors(PACKED, device)
    expected = call(PACKED, tensors, record, None)
    out, final = make_out(PACKED, device), torch.empty_like(expected.final_state)
    flashkda.fwd(
        *(tensors[name] for name in ("q", "k", "v", "g", "beta")), PACKED.scale, out, tensors["A_log"],
        tensors["dt_bias"], PACKED.lower_bound, initial_state=tensors["initial_state"], final_state=final,
        cu_seqlens=tensors["cu_seqlens"],
    )  # fmt: skip
    assert same_bits(out, expected.out) and same_bits(final, expected.final_state)
