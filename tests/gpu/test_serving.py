"""In a server's process: tracing, graphs, streams, threads, devices, and nothing written outside the results."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import (  # noqa: E402
    FILL,
    NAMES,
    STATE_DTYPES,
    Shape,
    Written,
    arguments,
    assert_same,
    call,
    draw_shape,
    filled,
    make_tensors,
    workspace_of,
)
from state_calls import StateCall, assert_written, expected, make  # noqa: E402

import flashkda  # noqa: E402
from flashkda.bits import same_bits  # noqa: E402
from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

PACKED = Shape(T=90, H=3, cu_seqlens=(0, 21, 21, 68, 90), seed=21)
FIXED = Shape(T=50, H=2, B=2, initial="none", final="fp32", seed=22)
POOLED = StateCall(
    PACKED, state_indices=(3, 0, -1, 4), slots=(5, 5), has_initial_state=(True, False, True, True),
    checkpoint_every=16, checkpoint_cu_starts=(0, 2, 2, 5, 7), capacity=7,
)  # fmt: skip
GUARD = 1024


def results(shape: Shape, tensors, **more):
    """`arguments` with zeros to write to."""
    out = torch.zeros_like(tensors["q"])
    final = torch.zeros(
        len(shape.sequences), shape.H, HEAD_DIM, HEAD_DIM, dtype=STATE_DTYPES[shape.final], device=out.device
    )
    return arguments(shape, tensors, out=out, final_state=final) | more


def written(given) -> Written:
    return Written(given["out"], given["final_state"], given.get("workspace"))


# --- torch.compile and the operator --------------------------------------------------------------


@pytest.mark.parametrize("own_workspace", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("shape", [PACKED, FIXED], ids=str)
def test_opcheck_passes(shape: Shape, own_workspace: bool, device) -> None:
    from flashkda.torch_operator import fwd

    given = results(shape, make_tensors(shape, device))
    if own_workspace:
        given["workspace"] = workspace_of(shape, device)
    torch.library.opcheck(fwd.default, (), given)


def test_opcheck_passes_with_a_state_updated_in_place(device) -> None:
    from flashkda.torch_operator import fwd

    given = results(PACKED, make_tensors(PACKED, device))
    torch.library.opcheck(fwd.default, (), given | {"initial_state": given["final_state"]})


def test_opcheck_passes_with_pools_and_checkpoints(device) -> None:
    from flashkda.torch_operator import fwd

    torch.library.opcheck(fwd.default, (), make(POOLED, device).arguments)


def needs(backend: str) -> None:
    if backend == "inductor":
        from torch.utils._triton import has_triton

        if not has_triton():
            pytest.skip("inductor's GPU code needs triton")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cudagraphs", "inductor"])
@pytest.mark.parametrize("shape", [PACKED, FIXED], ids=str)
def test_a_compiled_layer_has_the_bits_of_an_eager_one(shape: Shape, backend: str, device) -> None:
    needs(backend)
    torch.compiler.reset()

    def layer(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens):
        final = torch.empty(
            len(shape.sequences), shape.H, HEAD_DIM, HEAD_DIM, dtype=STATE_DTYPES[shape.final], device=q.device
        )
        out = torch.empty_like(v)
        flashkda.fwd(
            q,
            k,
            v * 1.0,
            g,
            beta,
            shape.scale,
            out,
            A_log,
            dt_bias,
            shape.lower_bound,
            initial_state,
            final,
            cu_seqlens,
        )
        return out + 1.0, final

    tensors = make_tensors(shape, device)
    inputs = [tensors[name] for name in NAMES]
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.inference_mode():
        expected = layer(*inputs)
        for _ in range(4):
            out, final = compiled(*inputs)
            assert same_bits(out, expected[0]) and same_bits(final, expected[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_updates_a_state_in_place(backend: str, device) -> None:
    needs(backend)
    torch.compiler.reset()
    shape = replace(PACKED, initial="fp32", final="fp32")
    tensors = make_tensors(shape, device)
    eager, compiled = (results(shape, tensors) for _ in range(2))
    for given in (eager, compiled):
        given["initial_state"] = given["final_state"]
    call_compiled = torch.compile(flashkda.fwd, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            flashkda.fwd(**eager)
            call_compiled(**compiled)
            assert_same(written(compiled), written(eager))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_updates_a_pool_in_place(backend: str, device, record) -> None:
    needs(backend)
    torch.compiler.reset()
    case = replace(POOLED, shape=replace(PACKED, in_place=True))
    given = make(case, device)
    wanted = expected(case, given, record)
    with torch.no_grad():
        torch.compile(flashkda.fwd, fullgraph=True, backend=backend)(**given.arguments)
    assert_written(given, wanted)


def test_the_functional_form_equals_the_call_eager_and_compiled_over_lengths(device) -> None:
    torch.compiler.reset()
    compiled = torch.compile(flashkda.prefill, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (90, 77, 33):
        shape = replace(PACKED, T=tokens, cu_seqlens=(0, 10, 10, 30, tokens), final="fp32")
        tensors = make_tensors(shape, device)
        expected = results(shape, tensors)
        flashkda.fwd(**expected)
        for prefill in (flashkda.prefill, compiled):
            with torch.no_grad():
                out, final = prefill(**arguments(shape, tensors), output_final_state=True)
            assert_same(Written(out, final, None), written(expected))


def test_gradients_are_refused_and_inference_tensors_are_not(device) -> None:
    tensors = make_tensors(FIXED, device)
    expected = results(FIXED, tensors)
    flashkda.fwd(**expected)
    learning = {**tensors, "k": tensors["k"].clone().requires_grad_()}
    with pytest.raises(flashkda.ArgumentError, match=r"k is a tensor that requires grad.*torch\.no_grad"):
        flashkda.fwd(**results(FIXED, learning))
    with torch.inference_mode():
        given = results(FIXED, learning)
        flashkda.fwd(**given)
    assert_same(written(given), written(expected))


# --- CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("own_workspace", [False, True], ids=["allocated", "given"])
def test_a_replay_follows_changed_contents_of_every_tensor(own_workspace: bool, cu_dtype, device, all_bv) -> None:
    flashkda.preload(device)
    shape = replace(PACKED, cu_dtype=cu_dtype)
    for bv in all_bv:
        static = make_tensors(shape, device)
        given = results(shape, static, bv=bv)
        if own_workspace:
            given["workspace"] = workspace_of(shape, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashkda.fwd(**given)
        for seed, bounds in ((31, (0, 21, 21, 68, 90)), (32, (3, 40, 41, 41, 85)), (33, (0, 0, 0, 0, 90))):
            changed = replace(shape, seed=seed, cu_seqlens=bounds)
            tensors = make_tensors(changed, device)
            for name in NAMES:
                static[name].copy_(tensors[name])
            given["out"].zero_()
            graph.replay()
            expected = results(changed, tensors)
            flashkda.fwd(**expected)
            assert_same(written(given), written(expected))


@pytest.mark.parametrize("workspaces", ["shared", "owned", "one_pool"])
def test_several_captures_replay_in_any_order(workspaces: str, device) -> None:
    flashkda.preload(device)
    shapes = [PACKED, FIXED, Shape(T=300, H=4, seed=41), replace(PACKED, seed=42, initial="fp32")]
    shared = torch.cat([workspace_of(shape, device) for shape in shapes])
    pool = torch.cuda.graph_pool_handle() if workspaces == "one_pool" else None
    captured = []
    for shape in shapes:
        tensors = make_tensors(shape, device)
        expected = results(shape, tensors)
        flashkda.fwd(**expected)
        given = results(shape, tensors, workspace=shared if workspaces == "shared" else None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            flashkda.fwd(**given)
        captured.append((graph, given, expected))
    for order in ((0, 1, 2, 3), (3, 1, 1, 0, 2), (2, 2, 0, 3, 1)):
        for index in order:
            graph, given, expected = captured[index]
            given["out"].zero_()
            given["final_state"].zero_()
            graph.replay()
            # An eager call between replays is no disturbance.
            between = results(shapes[0], {name: captured[0][2][name] for name in NAMES})
            flashkda.fwd(**between)
            assert_same(written(given), written(expected))
            assert_same(written(between), written(captured[0][2]))


# --- streams, threads, devices -------------------------------------------------------------------


def test_sixteen_threads_on_sixteen_streams(device) -> None:
    shapes = [Shape(T=100 + 37 * seed, H=1 + seed % 5, seed=seed, final="fp32") for seed in range(16)]
    tensors = [make_tensors(shape, device) for shape in shapes]
    expected = [results(shape, given) for shape, given in zip(shapes, tensors, strict=True)]
    for given in expected:
        flashkda.fwd(**given)
    torch.cuda.synchronize(device)
    start, wrong = threading.Barrier(16), []

    def serve(index: int) -> None:
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                runs = [results(shapes[index], tensors[index]) for _ in range(40)]
                start.wait(60)
                for given in runs:
                    flashkda.fwd(**given)
                stream.synchronize()
                for given in runs:
                    assert_same(written(given), written(expected[index]))
        except BaseException as error:
            wrong.append((index, error))

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def assert_ordered_on(stream, device) -> None:
    """A call on the stream comes after what the stream was given before."""
    tensors = make_tensors(PACKED, device)
    expected = results(PACKED, tensors)
    flashkda.fwd(**expected)
    late = {**tensors, "v": torch.full_like(tensors["v"], 7.0)}
    given = results(PACKED, late)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        # Long enough that work on any other stream would see the v that is not there yet.
        torch.cuda._sleep(50_000_000)
        late["v"].copy_(tensors["v"])
        flashkda.fwd(**given)
    stream.synchronize()
    assert_same(written(given), written(expected))


def test_the_per_thread_default_stream_is_respected(device) -> None:
    per_thread = torch.cuda.ExternalStream(2, device=device)
    assert_ordered_on(per_thread, device)
    wrong = []

    def in_a_thread() -> None:
        try:
            assert_ordered_on(per_thread, device)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert not wrong


@pytest.fixture
def other_device(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", 1 - device.index)


def test_a_call_on_another_device_leaves_the_current_one(device, other_device) -> None:
    from cuda.bindings import driver

    expected = results(PACKED, make_tensors(PACKED, device))
    flashkda.fwd(**expected)
    there = results(PACKED, {k: t if t is None else t.to(other_device) for k, t in expected.items() if k in NAMES})
    torch.cuda.synchronize(other_device)
    context = int(driver.cuCtxGetCurrent()[1])
    assert torch.cuda.current_device() == device.index
    flashkda.fwd(**there)
    assert torch.cuda.current_device() == device.index
    assert int(driver.cuCtxGetCurrent()[1]) == context
    torch.cuda.synchronize(other_device)
    assert same_bits(there["out"].to(device), expected["out"])
    assert same_bits(there["final_state"].to(device), expected["final_state"])


def test_a_graph_on_another_device(device, other_device) -> None:
    flashkda.preload(other_device)
    with torch.cuda.device(other_device):
        tensors = make_tensors(PACKED, other_device)
        expected, given = (results(PACKED, tensors) for _ in range(2))
        flashkda.fwd(**expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashkda.fwd(**given)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(written(given), written(expected))


def test_two_devices_at_once_from_two_threads(device, other_device) -> None:
    alone = results(PACKED, make_tensors(PACKED, device))
    flashkda.fwd(**alone)
    torch.cuda.synchronize(device)
    inputs = {where: {name: alone[name].to(where) for name in NAMES} for where in (device, other_device)}
    expected = {where: Written(alone["out"].to(where), alone["final_state"].to(where), None) for where in inputs}
    for where in inputs:
        torch.cuda.synchronize(where)
    wrong = []

    def serve(where) -> None:
        try:
            # The thread's current device stays the first one for both.
            runs = [results(PACKED, inputs[where]) for _ in range(200)]
            for given in runs:
                # What a run that launches nothing would leave.
                for name in ("out", "final_state"):
                    given[name].view(torch.uint8).fill_(FILL)
                    assert not same_bits(given[name], getattr(expected[where], name))
            for given in runs:
                flashkda.fwd(**given)
            torch.cuda.synchronize(where)
            for given in runs:
                assert_same(written(given), expected[where])
        except BaseException as error:
            wrong.append((where, error))

    threads = [threading.Thread(target=serve, args=(where,)) for where in (device, other_device)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_on_two_devices_are_refused(device, other_device) -> None:
    given = results(PACKED, make_tensors(PACKED, device))
    for name in (*NAMES[1:], "out", "final_state"):
        with pytest.raises(flashkda.ArgumentError, match=f"{name} is a tensor on {other_device}"):
            flashkda.fwd(**(given | {name: given[name].to(other_device)}))


# --- nothing outside the results -----------------------------------------------------------------


def small(seed: int) -> Shape:
    shape = draw_shape(seed)
    return shape if shape.T * shape.H <= 20_000 else replace(shape, H=1 + seed % 3)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_guard_bands_stay_and_nan_filled_memory_is_no_input(seed: int, device, record, all_bv) -> None:
    shape = replace(small(seed), fused=False, pooled=False, in_place=False)
    tensors = make_tensors(shape, device)
    expected = call(shape, tensors, record, None)
    # Exactly what the call needs, not the bound: a write past it must show.
    sizes = {"out": tensors["q"].numel() * 2, "workspace": shape.H * shape.tiles * record.bytes}
    if shape.final != "none":
        sizes["final_state"] = expected.final_state.numel() * expected.final_state.element_size()
    bv = all_bv[seed % len(all_bv)]
    buffer = filled(sum(sizes.values()) + GUARD * (len(sizes) + 1), device)
    views, bands, offset = {}, [], 0
    for name, size in sizes.items():
        bands.append(buffer[offset : offset + GUARD])
        views[name] = buffer[offset + GUARD : offset + GUARD + size]
        # All ones is NaN in bf16 and fp32.
        views[name].fill_(0xFF)
        offset += GUARD + size
    bands.append(buffer[offset:])
    given = arguments(shape, tensors, out=views["out"].view(torch.bfloat16).view_as(tensors["q"]), bv=bv)
    given["workspace"] = views["workspace"]
    if "final_state" in views:
        given["final_state"] = views["final_state"].view(expected.final_state.dtype).view_as(expected.final_state)
    flashkda.fwd(**given)
    torch.cuda.synchronize(device)
    assert all(bool((band == FILL).all()) for band in bands)
    inside = torch.zeros(shape.B * shape.T, dtype=torch.bool, device=device)
    for start, end in shape.sequences:
        inside[start:end] = True
    rows, expected_rows = (out.reshape(shape.B * shape.T, -1) for out in (given["out"], expected.out))
    assert same_bits(rows[inside], expected_rows[inside])
    assert bool((rows[~inside].contiguous().view(torch.int16) == -1).all())
    if "final_state" in given:
        assert same_bits(given["final_state"], expected.final_state)
