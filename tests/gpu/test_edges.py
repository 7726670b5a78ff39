"""Edges: empty calls, poison, wrong metadata, bad arguments, streams and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from calls import (  # noqa: E402
    FILL,
    STATE_DTYPES,
    Shape,
    assert_same,
    call,
    filled,
    make_out,
    make_tensors,
    workspace_of,
)
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from state_calls import StateCall, assert_written, expected, make  # noqa: E402

import flashkda  # noqa: E402
from flashkda.bits import same_bits  # noqa: E402
from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

#: Wider than any tensor here: what misses one by a slot, a head or a sequence still lands in a band.
BAND = 1 << 20
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


#: Sound calls by how their states are kept; each is then given wrong offsets, indices and rows.
THREE = Shape(T=90, H=2, cu_seqlens=(0, 30, 61, 90), initial="fp32", final="fp32", seed=9)
POOLED = StateCall(
    THREE, state_indices=(3, 0, 4), slots=(5, 6), checkpoint_every=16, checkpoint_cu_starts=(0, 2, 4, 6), capacity=7
)
SOUND = {
    "dense": StateCall(THREE),
    "pools": POOLED,
    "in_place": replace(
        POOLED, shape=replace(THREE, initial="bf16", final="bf16", in_place=True), slots=(5, 5),
        has_initial_state=(True, False, True), checkpoint_dtype="fp32",
    ),
}  # fmt: skip
WRONG_INDICES = [(3, -1, 4), (7, 0, 5), (2**31 - 1, 1, -(2**31)), (2**40, 2**32 + 3, -(2**62))]
WRONG_ROWS = [(6, 4, 2, 0), (-3, 1, 5, 9), (-(2**31), 2**31 - 1, 3, 2**31 - 1), (2**33, 2**32 + 1, -(2**40), 2**62)]


@pytest.fixture(scope="module")
def sound(device, record):
    """Each sound call's tensors, and what it must write."""
    made = {form: make(case, device) for form, case in SOUND.items()}
    return {form: (given, expected(SOUND[form], given, record)) for form, given in made.items()}


def in_bands(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A buffer, and in it a copy of each tensor with a guard band before and behind it."""
    sizes = {name: part.numel() * part.element_size() for name, part in parts.items()}
    assert not any(size % 16 for size in sizes.values())
    buffer = filled(sum(sizes.values()) + BAND * (len(sizes) + 1), next(iter(parts.values())).device)
    copies, offset = {}, BAND
    for name, part in parts.items():
        piece = buffer[offset : offset + sizes[name]]
        piece.copy_(part.contiguous().view(torch.uint8).flatten())
        copies[name] = piece.view(part.dtype).view(part.shape)
        offset += sizes[name] + BAND
    return buffer, copies


def clamped(offsets: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(min(max(offset, 0), most) for offset in offsets)


def assert_only_its_own_is_written(case: StateCall, device, record, bv: int | None) -> None:
    """A call with wrong metadata changes nothing but its workspace and the rows, slots and checkpoints it points at."""
    made = make(case, device)
    # Exactly what the call needs, not the bound: a write past it must show. All ones is NaN.
    needed = case.shape.H * case.shape.tiles * record.bytes
    parts = {
        "out": torch.full_like(made.arguments["out"].view(torch.int16), -1).view(torch.bfloat16),
        "workspace": torch.full((needed,), 0xFF, dtype=torch.uint8, device=device),
    }
    parts |= {name: made.pools[name].slots for name in ("final_state", "checkpoints") if name in made.pools}
    buffer, given = in_bands(parts)
    wanted, owned = in_bands(parts)
    if case.shape.in_place:
        given["initial_state"] = given["final_state"]
    flashkda.fwd(**(made.arguments | given), bv=bv)
    torch.cuda.synchronize(device)
    # Offsets count as if they were cut to the tokens that there are.
    case = replace(case, shape=replace(case.shape, cu_seqlens=clamped(case.shape.cu_seqlens, case.shape.T)))
    own = {
        "out": {token for n in case.live for token in range(*case.shape.sequences[n])},
        "final_state": set(case.slots_of(case.live)),
        "checkpoints": {row for _, _, row in case.checkpoint_rows},
    }
    owned["workspace"].copy_(given["workspace"])
    for name, numbers in own.items():
        if name in owned and numbers:
            rows = torch.tensor(sorted(numbers), device=device)
            # As bytes: a copy of values need not keep those of a NaN.
            mine, theirs = (one[name].flatten(0, 1) if name == "out" else one[name] for one in (owned, given))
            mine.view(torch.uint8)[rows] = theirs.view(torch.uint8)[rows]
    assert same_bits(buffer, wanted)


def assert_still_right(form: str, sound, device, bv: int | None) -> None:
    made, wanted = sound[form]
    given = made.fresh()
    flashkda.fwd(**given.arguments, workspace=workspace_of(THREE, device), bv=bv)
    assert_written(given, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_metadata_write_nothing_that_is_not_theirs(kind: str, dtype, sound, device, record, all_bv) -> None:
    if dtype == torch.int32 and kind == "beyond_int32":
        pytest.skip("not an int32")
    choices = list(zip(WRONG_INDICES, WRONG_ROWS, strict=True))[: 3 if dtype == torch.int32 else 4]
    for form, case in SOUND.items():
        wrong = replace(case, shape=replace(case.shape, cu_seqlens=WRONG[kind], cu_dtype=dtype))
        for number, bv in enumerate(all_bv):
            if form != "dense":
                indices, rows = choices[number % len(choices)]
                wrong = replace(
                    wrong, state_indices=indices, index_dtype=dtype, checkpoint_cu_starts=rows, starts_dtype=dtype
                )
            assert_only_its_own_is_written(wrong, device, record, bv)
            assert_still_right(form, sound, device, bv)


@st.composite
def wrong_calls(draw) -> tuple[str, StateCall]:
    """A sound call's form, and the call with four offsets, three indices and four rows from anywhere."""
    form = draw(st.sampled_from(list(SOUND)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    least, most = (-(2**31), 2**31 - 1) if dtype == torch.int32 else (-(2**40), 2**40)

    def numbers(count: int, near: int) -> tuple[int, ...]:
        one = st.integers(-3, near + 3) | st.integers(-(2**40), 2**40)
        # int32 has what is nearest.
        return tuple(min(max(n, least), most) for n in draw(st.lists(one, min_size=count, max_size=count)))

    case = SOUND[form]
    case = replace(case, shape=replace(case.shape, cu_seqlens=numbers(4, THREE.T), cu_dtype=dtype))
    if form != "dense":
        case = replace(
            case, state_indices=numbers(3, 6), index_dtype=dtype, checkpoint_cu_starts=numbers(4, 7),
            starts_dtype=dtype,
        )  # fmt: skip
    return form, case


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(wrong=wrong_calls(), choice=st.integers(0, 4))
def test_drawn_metadata_write_nothing_that_is_not_theirs(wrong, choice: int, sound, device, record, all_bv) -> None:
    form, case = wrong
    bv = all_bv[choice % len(all_bv)]
    assert_only_its_own_is_written(case, device, record, bv)
    assert_still_right(form, sound, device, bv)


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


#: Everything given, so that everything can be wrong.
WHOLE = StateCall(
    replace(PACKED, final="fp32"), state_indices=(6, 0, 3, 5), slots=(7, 8),
    has_initial_state=(True, False, True, True), checkpoint_every=16, checkpoint_cu_starts=(0, 2, 2, 5, 6), capacity=6,
)  # fmt: skip
RESULTS = ("out", "final_state", "workspace", "checkpoints")
ROWS = ("q", "k", "v", "g", "out")
STATES = ("initial_state", "final_state", "checkpoints")
INTEGERS = ("cu_seqlens", "state_indices", "checkpoint_cu_starts")
TENSORS = (*ROWS, *STATES, *INTEGERS, "beta", "A_log", "dt_bias", "has_initial_state", "workspace")
WRONG_NUMBERS = {
    "lower_bound": [1, 1.0, -20, -20.0, float("nan"), float("-inf"), None, "-5"],
    "scale": [float("nan"), float("inf"), 1e39, None],
    "bv": [0, 8, 48, -16, 16.0, True],
    "checkpoint_every": [0, 8, 17, -16, 16.0, None],
}


@pytest.fixture(scope="module")
def whole(device, record):
    """The tensors of a sound call with a workspace of exactly its size, and what it must write."""
    made = make(WHOLE, device)
    needed = WHOLE.shape.H * WHOLE.shape.tiles * record.bytes
    return made, needed, expected(WHOLE, made, record)


def one_of(names, *more) -> st.SearchStrategy:
    return st.tuples(st.sampled_from(names), *more)


#: What is wrong: how, with which argument, and what else that needs.
wrong_arguments = st.one_of(
    st.tuples(st.just("dtype"), one_of(TENSORS, st.sampled_from([torch.float64, torch.float16, torch.int8]))),
    # Of A_log and dt_bias only the number of elements counts.
    st.tuples(st.just("rank"), one_of([name for name in TENSORS if name not in ("A_log", "dt_bias")])),
    st.tuples(st.just("size"), one_of(TENSORS)),
    # beta has any strides.
    st.tuples(st.just("stride"), one_of([name for name in TENSORS if name != "beta"])),
    st.tuples(st.just("pitch"), one_of((*ROWS, *STATES))),
    st.tuples(st.just("folded"), one_of(("out", *STATES))),
    st.tuples(st.just("alignment"), one_of((*ROWS, *STATES, "workspace"))),
    st.tuples(st.just("cpu"), one_of(TENSORS)),
    # Without the others, which are optional, the call is another one.
    st.tuples(
        st.just("none"), one_of([n for n in TENSORS if n not in ("final_state", "has_initial_state", "workspace")])
    ),
    st.tuples(st.just("overlap"), one_of(RESULTS, st.sampled_from(TENSORS), st.integers(0, 1 << 30))),
    st.tuples(st.just("short"), st.tuples(st.just("workspace"), st.integers(0, 1 << 30))),
    st.sampled_from([("number", (name, value)) for name, values in WRONG_NUMBERS.items() for value in values]),
)


def change(how: str, what: tuple, given: dict[str, object]) -> dict[str, object]:
    """The arguments that are then wrong."""
    name, tensor = what[0], given[what[0]]
    if how == "number":
        return {name: what[1]}
    if how == "none":
        return {name: None}
    if how == "cpu":
        return {name: tensor.cpu()}
    if how == "dtype":
        return {name: tensor.to(what[1])}
    if how == "rank":
        return {name: tensor[None].clone()}
    if how == "size":
        # A pool has any number of slots.
        return {name: (tensor[:, :-1] if name in (*ROWS, *STATES, "beta") else tensor[:-1]).clone()}
    if how == "stride":
        if name in STATES:
            return {name: tensor.transpose(2, 3).contiguous().transpose(2, 3)}
        return {name: torch.stack([tensor, tensor], -1)[..., 0]}
    if how == "pitch":
        # Steps that end one element past a multiple of 16 bytes: of tokens, of slots.
        dimension = 1 if name in ROWS else 0
        strides = list(tensor.contiguous().stride())
        strides[dimension] += 1
        base = torch.zeros(tensor.numel() + tensor.shape[dimension], dtype=tensor.dtype, device=tensor.device)
        return {name: base.as_strided(tensor.shape, strides).copy_(tensor)}
    if how == "folded":
        # All tokens in one place, all slots.
        return {name: (tensor[:, :1] if name == "out" else tensor[:1]).clone().expand(tensor.shape)}
    if how == "alignment":
        base = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return {name: base[1:].view(tensor.shape).copy_(tensor)}
    if how == "short":
        return {name: tensor[: what[1] % len(tensor)].clone()}
    assert how == "overlap"
    _, other, where = what
    inside = given[other] if other != name else given["v"]
    other = other if other != name else "v"
    sizes = [t.numel() * t.element_size() for t in (tensor, inside)]
    buffer = filled(sum(sizes) + 16, tensor.device)
    # Not at the start: final_state may be all of initial_state.
    offset = 16 * (1 + where % (sizes[0] // 16 - 1))
    changed = {}
    for key, like, size, at in ((name, tensor, sizes[0], 0), (other, inside, sizes[1], offset)):
        changed[key] = buffer[at : at + size].view(like.dtype).view(like.shape).copy_(like)
    return changed


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(wrong=wrong_arguments)
def test_a_drawn_wrong_argument_is_refused_and_nothing_is_written(wrong, whole, device) -> None:
    how, what = wrong
    made, needed, wanted = whole
    right = made.fresh()
    arguments = right.arguments | {"workspace": filled(needed, device), "bv": None}
    changed = change(how, what, arguments)
    named = {name: x for d in (arguments, changed) for name, x in d.items() if isinstance(x, torch.Tensor)}
    watched = [arguments[name] for name in RESULTS] + [named[name] for name in RESULTS]
    before = [memory(tensor).clone() for tensor in watched]
    with pytest.raises(flashkda.FlashKDAError) as caught:
        flashkda.fwd(**(arguments | changed))
    assert type(caught.value) is flashkda.ArgumentError
    torch.cuda.synchronize(device)
    for tensor, bytes_before in zip(watched, before, strict=True):
        assert torch.equal(memory(tensor), bytes_before)
    flashkda.fwd(**arguments)
    assert_written(right, wanted)


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
