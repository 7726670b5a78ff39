"""Every argument of `flashkda.fwd`, damaged in every way there is: always our exception, never a launch.

Each damage is tried as the first call, after a sound call whose signature is known by then, and after so many sound
calls that the next one would not build its signature any more.
"""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashkda
from flashkda import api
from flashkda.errors import ArgumentError

torch = pytest.importorskip("torch")

Arguments = dict[str, Any]
Damage = Callable[[Any], Any]

ROWS = ("q", "k", "v", "g", "out")
STATES = ("initial_state", "final_state")
STRIDED = (*STATES, "checkpoints")
VECTORS = ("state_indices", "has_initial_state", "checkpoint_cu_starts")
OPTIONAL = (*STRIDED, *VECTORS, "cu_seqlens", "workspace")
TENSORS = (*ROWS, "beta", "A_log", "dt_bias", *OPTIONAL)
ALLOWED = {
    **dict.fromkeys((*ROWS, "beta"), (torch.bfloat16,)),
    **dict.fromkeys(("A_log", "dt_bias"), (torch.float32,)),
    **dict.fromkeys(STRIDED, (torch.bfloat16, torch.float32)),
    **dict.fromkeys(("cu_seqlens", "state_indices", "checkpoint_cu_starts"), (torch.int32, torch.int64)),
    "has_initial_state": (torch.bool,),
    "workspace": (torch.uint8,),
}
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
ALIGNMENT = {name: 16 for name in TENSORS} | {"beta": 2, "A_log": 4, "dt_bias": 4, "cu_seqlens": 8}
ALIGNMENT |= {"state_indices": 8, "has_initial_state": 1, "checkpoint_cu_starts": 8}
JUNK = [3, 0, -1.5, float("nan"), "q", b"", [], [1.0], (), {}, object(), len, torch.float32, torch.Size([1]), 10**5000]

# Sound calls in front of the damaged one.
AFTER = st.sampled_from([0, 1, 3])

quietly = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def plain(tensor: Any) -> Any:
    return tensor.as_subclass(torch.Tensor)


@pytest.fixture
def make(on_cuda: Callable[..., Any], artifact_folder: Path) -> Callable[..., Arguments]:
    """Sound arguments, all given and every size at least 2, so that each stride counts."""

    def arguments(seqlen: int = 20, heads: int = 2, sequences: int = 2, state: Any = torch.float32) -> Arguments:
        shape = (1, seqlen, heads, 128)
        found: Arguments = {name: on_cuda(torch.zeros(shape, dtype=torch.bfloat16)) for name in ROWS}
        found["beta"] = on_cuda(torch.zeros(shape[:3], dtype=torch.bfloat16))
        found |= {"A_log": on_cuda(torch.zeros(heads)), "dt_bias": on_cuda(torch.zeros(heads, 128))}
        found |= {name: on_cuda(torch.zeros(sequences, heads, 128, 128, dtype=state)) for name in STRIDED}
        for name in ("cu_seqlens", "checkpoint_cu_starts"):
            found[name] = on_cuda(torch.zeros(sequences + 1, dtype=torch.int64))
        found["state_indices"] = on_cuda(torch.zeros(sequences, dtype=torch.int64))
        found["has_initial_state"] = on_cuda(torch.zeros(sequences, dtype=torch.bool))
        size = flashkda.workspace_size(seqlen, heads, sequences)
        found["workspace"] = on_cuda(torch.zeros(size, dtype=torch.uint8))
        return found | {"scale": 0.5, "lower_bound": -5.0, "bv": None, "checkpoint_every": 16}

    return arguments


def assert_refused(
    cuda: Any, sound: Arguments, name: str, value: Any, others: tuple[str, ...] = (), after: int = 0
) -> None:
    """The call with one value changed is refused in that argument's name (or that of one that no longer fits it)."""
    api._calls.clear()
    api._recent = ()
    cuda.launches.clear()
    for _ in range(after):
        flashkda.fwd(**sound)
    assert len(cuda.launches) == 2 * after
    cuda.launches.clear()
    with pytest.raises(ArgumentError) as caught:
        flashkda.fwd(**(sound | {name: value}))
    error = caught.value
    assert error.argument in (name, *others), str(error)
    assert error.value and error.allowed and error.remedy and str(error).startswith(error.argument)
    assert not cuda.launches and cuda.contexts == [0]


@quietly
@given(name=st.sampled_from(TENSORS), junk=st.sampled_from(JUNK), after=AFTER)
def test_what_is_no_tensor(make: Any, cuda: Any, name: str, junk: Any, after: int) -> None:
    assert_refused(cuda, make(), name, junk, after=after)


@quietly
@given(name=st.sampled_from([name for name in TENSORS if name not in OPTIONAL]), after=AFTER)
def test_a_required_tensor_that_is_none(make: Any, cuda: Any, name: str, after: int) -> None:
    assert_refused(cuda, make(), name, None, after=after)


@quietly
@given(name=st.sampled_from(TENSORS), dtype=st.sampled_from(DTYPES), after=AFTER)
def test_any_other_dtype(make: Any, on_cuda: Any, cuda: Any, name: str, dtype: Any, after: int) -> None:
    sound = make()
    value = on_cuda(torch.zeros(sound[name].shape, dtype=dtype))
    if dtype in ALLOWED[name]:
        flashkda.fwd(**(sound | {name: value}))
    else:
        assert_refused(cuda, sound, name, value, after=after)


@quietly
@given(name=st.sampled_from(TENSORS), where=st.sampled_from(["cpu", "meta", "cuda:1", "sparse"]), after=AFTER)
def test_any_other_device_or_layout(make: Any, on_cuda: Any, cuda: Any, name: str, where: str, after: int) -> None:
    sound = make()
    tensor = plain(sound[name])
    if where == "meta":
        tensor = tensor.to("meta")
    elif where == "cuda:1":
        tensor = on_cuda(tensor, 1)
    elif where == "sparse":
        tensor = tensor.to_sparse()
    # With q elsewhere, the first of the others that is not where q is stands out.
    assert_refused(cuda, sound, name, tensor, others=("k",) if (name, where) == ("q", "cuda:1") else (), after=after)


@quietly
@given(name=st.sampled_from(TENSORS), data=st.data(), after=AFTER)
def test_any_other_shape(make: Any, on_cuda: Any, cuda: Any, name: str, data: st.DataObject, after: int) -> None:
    sound = make()
    tensor = plain(sound[name])
    rank = tensor.dim()
    kind = data.draw(st.sampled_from(["unsqueeze", "flatten", "scalar", "resize"]))
    if kind == "unsqueeze":
        other = tensor.unsqueeze(data.draw(st.integers(0, rank)))
    elif kind == "flatten" and rank > 1:
        other = tensor.reshape(-1)
    elif kind == "scalar":
        other = tensor.new_zeros(())
    else:
        sizes = list(tensor.shape)
        dimension = data.draw(st.integers(0, rank - 1))
        sizes[dimension] = data.draw(st.integers(0, 2 * sizes[dimension]).filter(lambda size: size != sizes[dimension]))
        other = tensor.new_zeros(sizes)
    others: tuple[str, ...] = ()
    if name == "q":
        # q gives the sizes: the others no longer fit, or (an empty batch, too many tokens) something of the call.
        others = TENSORS
    elif name == "cu_seqlens":
        others = (*VECTORS, "workspace")
    fits = {"A_log": other.numel() == tensor.numel(), "workspace": other.dim() == 1 and other.numel() >= tensor.numel()}
    fits["dt_bias"] = fits["A_log"]
    # Pools and checkpoints have any number of slots.
    fits |= dict.fromkeys(STRIDED, other.dim() == 4 and other.shape[1:] == tensor.shape[1:])
    if fits.get(name):
        flashkda.fwd(**(sound | {name: on_cuda(other)}))
    else:
        assert_refused(cuda, sound, name, on_cuda(other), others, after)


@quietly
@given(name=st.sampled_from(TENSORS), data=st.data(), after=AFTER)
def test_strides_that_are_not_allowed(
    make: Any, on_cuda: Any, cuda: Any, name: str, data: st.DataObject, after: int
) -> None:
    sound = make()
    tensor = plain(sound[name])
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if name in ROWS:
        dimension = data.draw(st.sampled_from([1, 2, 3]))
        if dimension == 3:
            strides[3] = data.draw(st.integers(0, 9).filter(lambda stride: stride != 1))
        else:
            strides[dimension] += data.draw(st.integers(1, 7))
    elif name == "beta":
        # Any strides will do.
        strides = data.draw(st.lists(st.integers(0, 100), min_size=3, max_size=3))
    elif name in STRIDED:
        strides[data.draw(st.sampled_from([0, 1, 2, 3]))] += data.draw(st.sampled_from([-1, 1, 5]))
    else:
        strides[-1] = data.draw(st.integers(0, 9).filter(lambda stride: stride != 1))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    other = on_cuda(torch.zeros(extent, dtype=tensor.dtype).as_strided(sizes, strides))
    if name == "beta":
        flashkda.fwd(**(sound | {name: other}))
    else:
        assert_refused(cuda, sound, name, other, after=after)


@quietly
@given(name=st.sampled_from(TENSORS), shift=st.integers(0, 31), after=AFTER)
def test_any_alignment(make: Any, on_cuda: Any, cuda: Any, name: str, shift: int, after: int) -> None:
    sound = make()
    # Far from everything else, so that only the alignment counts.
    value = on_cuda(plain(sound[name]), address=(1 << 50) + shift)
    if shift % ALIGNMENT[name] == 0:
        flashkda.fwd(**(sound | {name: value}))
    else:
        assert_refused(cuda, sound, name, value, after=after)


@quietly
@given(
    written=st.sampled_from(["out", "final_state", "workspace", "checkpoints"]), other=st.sampled_from(TENSORS),
    data=st.data(), after=AFTER,
)  # fmt: skip
def test_any_overlap_of_what_is_written(
    make: Any, on_cuda: Any, cuda: Any, written: str, other: str, data: st.DataObject, after: int
) -> None:
    sound = make()
    if written == other:
        return
    own, its = (sound[name].numel() * sound[name].element_size() for name in (written, other))
    base = 1 << 50
    step = data.draw(st.integers(-(own // 16) - 1, its // 16 + 1))
    call = sound | {other: on_cuda(plain(sound[other]), address=base)}
    value = on_cuda(plain(sound[written]), address=base + 16 * step)
    disjoint = 16 * step >= its or -16 * step >= own
    in_place = {written, other} == set(STATES) and step == 0
    if disjoint or in_place:
        flashkda.fwd(**(call | {written: value}))
    else:
        assert_refused(cuda, call, written, value, others=(other,), after=after)


@quietly
@given(data=st.data())
def test_what_is_accepted_shares_no_byte_with_what_is_written(
    make: Any, on_cuda: Any, cuda: Any, data: st.DataObject
) -> None:
    """Strided rows in one buffer, as slices of a fused projection are, against counting their rows."""
    tokens, heads = 3, 2
    sound = make(seqlen=tokens, heads=heads)
    base, taken = 1 << 50, {}
    for name in ROWS:
        head = data.draw(st.sampled_from([128, 256, 640]), label=f"{name} head stride")
        token = data.draw(st.sampled_from([128, 256, 512, 1280, 1288]), label=f"{name} token stride")
        start = data.draw(st.sampled_from([*range(0, 4096, 128), 8]), label=f"{name} start")
        strides = (tokens * token, token, head, 1)
        memory = torch.zeros(tokens * token + heads * head + 128, dtype=torch.bfloat16)
        sound[name] = on_cuda(memory.as_strided((1, tokens, heads, 128), strides), address=base + 2 * start)
        taken[name] = [
            {start + t * token + h * head + column for column in range(0, 128, 8)}
            for t in range(tokens)
            for h in range(heads)
        ]
    try:
        flashkda.fwd(**sound)
    except ArgumentError as error:
        assert error.argument == "out"
        return
    out = set().union(*taken["out"])
    assert len(out) == tokens * heads * 16
    assert not any(out & row for name in ROWS if name != "out" for row in taken[name])


@quietly
@given(missing=st.integers(1, 5 * 2 * 13600), after=AFTER)
def test_any_workspace_that_is_too_small(make: Any, on_cuda: Any, cuda: Any, missing: int, after: int) -> None:
    sound = make(seqlen=48, heads=2, sequences=2)
    exact = (48 // 16 + 2) * 2 * 13600
    size = max(0, exact - missing)
    assert_refused(cuda, sound, "workspace", on_cuda(torch.zeros(size, dtype=torch.uint8)), after=after)
    flashkda.fwd(**(sound | {"workspace": on_cuda(torch.zeros(exact, dtype=torch.uint8))}))


NUMBERS = st.floats() | st.integers() | st.fractions() | st.sampled_from([10**400, -(10**400), Fraction(10**400)])
NO_NUMBERS = st.sampled_from(
    [None, "1", b"1", 1j, 0.5 + 0j, [0.5], (), torch.tensor(0.5), torch.tensor([0.5, 0.5]), object(), "9" * 5000]
)


@quietly
@given(scale=NUMBERS, after=AFTER)
def test_any_scale(make: Any, cuda: Any, scale: Any, after: int) -> None:
    # float32's largest number and the half step that still rounds to it.
    if abs(scale) < 2**128 - 2**103:
        flashkda.fwd(**(make() | {"scale": scale}))
    else:
        assert_refused(cuda, make(), "scale", scale, after=after)


@quietly
@given(lower_bound=NUMBERS | st.floats(-6, 1), after=AFTER)
def test_any_lower_bound(make: Any, cuda: Any, lower_bound: Any, after: int) -> None:
    if -5 <= lower_bound <= 0:
        flashkda.fwd(**(make() | {"lower_bound": lower_bound}))
    else:
        assert_refused(cuda, make(), "lower_bound", lower_bound, after=after)


@quietly
@given(name=st.sampled_from(["scale", "lower_bound"]), value=NO_NUMBERS, after=AFTER)
def test_what_is_no_number(make: Any, cuda: Any, name: str, value: Any, after: int) -> None:
    # The sound call's number compares equal to some of these.
    assert_refused(cuda, make() | {name: 0.5 if name == "scale" else -0.5}, name, value, after=after)


@quietly
@given(
    bv=st.integers() | st.floats() | st.booleans() | NO_NUMBERS.filter(lambda value: value is not None)
    | st.sampled_from([0, 8, 16, 31, 33, 32.0, 64.0, Fraction(32), 32 + 0j, 10**5000, "32"]),
    after=AFTER,
)  # fmt: skip
def test_any_bv(make: Any, cuda: Any, bv: Any, after: int) -> None:
    if type(bv) is int and bv in (16, 32, 64, 128):
        flashkda.fwd(**(make() | {"bv": bv}))
    else:
        assert_refused(cuda, make() | {"bv": 32}, "bv", bv, after=after)


@quietly
@given(name=st.sampled_from([name for name in TENSORS if ALLOWED[name][0].is_floating_point]), after=AFTER)
def test_any_tensor_that_requires_grad(make: Any, on_cuda: Any, cuda: Any, name: str, after: int) -> None:
    sound = make()
    value = on_cuda(plain(sound[name]).clone().requires_grad_().view_as(sound[name]))
    assert_refused(cuda, sound, name, value, after=after)
    with torch.no_grad():
        flashkda.fwd(**(sound | {name: value}))


@quietly
@given(
    every=st.integers() | st.integers(1, 200).map(lambda chunks: 16 * chunks) | st.floats() | st.booleans() | NO_NUMBERS
    | st.sampled_from([16.0, Fraction(16), 16 + 0j, 2**31 - 16, 2**31, 10**5000]),
    after=AFTER,
)  # fmt: skip
def test_any_distance_of_checkpoints(make: Any, cuda: Any, every: Any, after: int) -> None:
    if type(every) is int and 0 < every < 2**31 and every % 16 == 0:
        flashkda.fwd(**(make() | {"checkpoint_every": every}))
    else:
        assert_refused(cuda, make(), "checkpoint_every", every, after=after)


NEEDS = {
    "state_indices": STATES, "has_initial_state": ("initial_state",), "checkpoint_every": ("checkpoints",),
    "checkpoint_cu_starts": ("checkpoints",),
}  # fmt: skip


@quietly
@given(given=st.sets(st.sampled_from([*NEEDS, *STRIDED, "cu_seqlens"])), calls=st.integers(1, 3))
def test_any_combination_of_pools_and_checkpoints(make: Any, cuda: Any, given: set[str], calls: int) -> None:
    cuda.launches.clear()
    call = make(sequences=1) | {name: None for name in (*NEEDS, *STRIDED, "cu_seqlens") if name not in given}
    wrong = {name for name in given if name in NEEDS and not given.intersection(NEEDS[name])}
    if "checkpoints" in given:
        wrong |= {"checkpoint_every"} - given
        if "cu_seqlens" in given:
            wrong |= {"checkpoint_cu_starts"} - given
    if not wrong:
        for _ in range(calls):
            flashkda.fwd(**call)
        assert len(cuda.launches) == 2 * calls
        return
    with pytest.raises(ArgumentError) as caught:
        flashkda.fwd(**call)
    assert caught.value.argument in wrong
    assert not cuda.launches


@quietly
@given(
    seqlen=st.integers(0, 40), heads=st.integers(0, 3), sequences=st.integers(1, 5), present=st.sets(
        st.sampled_from(OPTIONAL)
    ), state=st.sampled_from([torch.bfloat16, torch.float32]), bv=st.sampled_from([None, 16, 32, 64, 128]),
)  # fmt: skip
def test_every_sound_call_is_launched_with_its_own_sizes(
    make: Any, cuda: Any, seqlen: int, heads: int, sequences: int, present: set[str], state: Any, bv: int | None
) -> None:
    cuda.launches.clear()
    if "cu_seqlens" not in present:
        sequences = 1
    sound = make(seqlen=seqlen, heads=heads, sequences=sequences, state=state) | {"bv": bv}
    if "checkpoints" in present and "cu_seqlens" in present:
        present = present | {"checkpoint_cu_starts"}
    if "checkpoints" in present:
        present = present | {"checkpoint_every"}
    present = {name for name in present if name not in NEEDS or present.intersection(NEEDS[name])}
    sound |= {name: None for name in (*OPTIONAL, "checkpoint_every") if name not in present}
    flashkda.fwd(**sound)
    tiles = seqlen // 16 + sequences if "cu_seqlens" in present else -(-seqlen // 16)
    bv = bv or 16
    expected = [] if not seqlen or not heads else [f"entry_prepare_{'a' if bv == 16 else 'b'}"]
    if heads and (seqlen or "final_state" in present):
        expected.append(f"entry_recurrence_bv{bv}")
    assert [launch.entry for launch in cuda.launches] == expected
    for launch in cuda.launches:
        sizes = [launch.values[name] for name in ("seqlen", "num_heads", "num_seqs", "total_tiles")]
        assert sizes == [seqlen, heads, sequences, tiles]
        if launch.entry.startswith("entry_recurrence"):
            pools = [launch.values[name] for name in ("num_slots", "num_checkpoints", "checkpoint_chunks")]
            assert pools == [
                sequences if "state_indices" in present else 0, sequences if "checkpoints" in present else 0,
                1 if "checkpoints" in present else 0,
            ]  # fmt: skip
            for name in (*STRIDED, *VECTORS):
                assert launch.values[name] == (sound[name].data_ptr() if name in present else 0)
