"""Every argument of `flashkda.fwd`, damaged in every way there is: always our exception, never a launch.

Each damage is tried twice: as the first call, and after a sound call whose signature is known by then.
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
OPTIONAL = (*STATES, "cu_seqlens", "workspace")
TENSORS = (*ROWS, "beta", "A_log", "dt_bias", *OPTIONAL)
ALLOWED = {
    **dict.fromkeys((*ROWS, "beta"), (torch.bfloat16,)),
    **dict.fromkeys(("A_log", "dt_bias"), (torch.float32,)),
    **dict.fromkeys(STATES, (torch.bfloat16, torch.float32)),
    "cu_seqlens": (torch.int32, torch.int64),
    "workspace": (torch.uint8,),
}
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
ALIGNMENT = {name: 16 for name in TENSORS} | {"beta": 2, "A_log": 4, "dt_bias": 4, "cu_seqlens": 8}
JUNK = [3, 0, -1.5, float("nan"), "q", b"", [], [1.0], (), {}, object(), len, torch.float32, torch.Size([1]), 10**5000]

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
        found |= {name: on_cuda(torch.zeros(sequences, heads, 128, 128, dtype=state)) for name in STATES}
        found["cu_seqlens"] = on_cuda(torch.zeros(sequences + 1, dtype=torch.int64))
        size = flashkda.workspace_size(seqlen, heads, sequences)
        found["workspace"] = on_cuda(torch.zeros(size, dtype=torch.uint8))
        return found | {"scale": 0.5, "lower_bound": -5.0, "bv": None}

    return arguments


def assert_refused(
    cuda: Any, sound: Arguments, name: str, value: Any, others: tuple[str, ...] = (), after: bool = False
) -> None:
    """The call with one value changed is refused in that argument's name (or that of one that no longer fits it)."""
    api._calls.clear()
    api._latest = ((), None)
    cuda.launches.clear()
    if after:
        flashkda.fwd(**sound)
        assert len(cuda.launches) == 2
        cuda.launches.clear()
    with pytest.raises(ArgumentError) as caught:
        flashkda.fwd(**(sound | {name: value}))
    error = caught.value
    assert error.argument in (name, *others), str(error)
    assert error.value and error.allowed and error.remedy and str(error).startswith(error.argument)
    assert not cuda.launches and cuda.contexts == [0]


@quietly
@given(name=st.sampled_from(TENSORS), junk=st.sampled_from(JUNK), after=st.booleans())
def test_what_is_no_tensor(make: Any, cuda: Any, name: str, junk: Any, after: bool) -> None:
    assert_refused(cuda, make(), name, junk, after=after)


@quietly
@given(name=st.sampled_from([name for name in TENSORS if name not in OPTIONAL]), after=st.booleans())
def test_a_required_tensor_that_is_none(make: Any, cuda: Any, name: str, after: bool) -> None:
    assert_refused(cuda, make(), name, None, after=after)


@quietly
@given(name=st.sampled_from(TENSORS), dtype=st.sampled_from(DTYPES), after=st.booleans())
def test_any_other_dtype(make: Any, on_cuda: Any, cuda: Any, name: str, dtype: Any, after: bool) -> None:
    sound = make()
    value = on_cuda(torch.zeros(sound[name].shape, dtype=dtype))
    if dtype in ALLOWED[name]:
        flashkda.fwd(**(sound | {name: value}))
    else:
        assert_refused(cuda, sound, name, value, after=after)


@quietly
@given(name=st.sampled_from(TENSORS), where=st.sampled_from(["cpu", "meta", "cuda:1", "sparse"]), after=st.booleans())
def test_any_other_device_or_layout(make: Any, on_cuda: Any, cuda: Any, name: str, where: str, after: bool) -> None:
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
@given(name=st.sampled_from(TENSORS), data=st.data(), after=st.booleans())
def test_any_other_shape(make: Any, on_cuda: Any, cuda: Any, name: str, data: st.DataObject, after: bool) -> None:
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
        others = (*STATES, "workspace")
    fits = {"A_log": other.numel() == tensor.numel(), "workspace": other.dim() == 1 and other.numel() >= tensor.numel()}
    fits["dt_bias"] = fits["A_log"]
    if not fits.get(name):
        assert_refused(cuda, sound, name, on_cuda(other), others, after)


@quietly
@given(name=st.sampled_from(TENSORS), data=st.data(), after=st.booleans())
def test_strides_that_are_not_allowed(
    make: Any, on_cuda: Any, cuda: Any, name: str, data: st.DataObject, after: bool
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
    elif name in STATES:
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
@given(name=st.sampled_from(TENSORS), shift=st.integers(0, 31), after=st.booleans())
def test_any_alignment(make: Any, on_cuda: Any, cuda: Any, name: str, shift: int, after: bool) -> None:
    sound = make()
    # Far from everything else, so that only the alignment counts.
    value = on_cuda(plain(sound[name]), address=(1 << 50) + shift)
    if shift % ALIGNMENT[name] == 0:
        flashkda.fwd(**(sound | {name: value}))
    else:
        assert_refused(cuda, sound, name, value, after=after)


@quietly
@given(
    written=st.sampled_from(["out", "final_state", "workspace"]), other=st.sampled_from(TENSORS), data=st.data(),
    after=st.booleans(),
)  # fmt: skip
def test_any_overlap_of_what_is_written(
    make: Any, on_cuda: Any, cuda: Any, written: str, other: str, data: st.DataObject, after: bool
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
@given(missing=st.integers(1, 5 * 2 * 13856), after=st.booleans())
def test_any_workspace_that_is_too_small(make: Any, on_cuda: Any, cuda: Any, missing: int, after: bool) -> None:
    sound = make(seqlen=48, heads=2, sequences=2)
    exact = (48 // 16 + 2) * 2 * 13856
    size = max(0, exact - missing)
    assert_refused(cuda, sound, "workspace", on_cuda(torch.zeros(size, dtype=torch.uint8)), after=after)
    flashkda.fwd(**(sound | {"workspace": on_cuda(torch.zeros(exact, dtype=torch.uint8))}))


NUMBERS = st.floats() | st.integers() | st.fractions() | st.sampled_from([10**400, -(10**400), Fraction(10**400)])
NO_NUMBERS = st.sampled_from(
    [None, "1", b"1", 1j, 0.5 + 0j, [0.5], (), torch.tensor(0.5), torch.tensor([0.5, 0.5]), object(), "9" * 5000]
)


@quietly
@given(scale=NUMBERS, after=st.booleans())
def test_any_scale(make: Any, cuda: Any, scale: Any, after: bool) -> None:
    # float32's largest number and the half step that still rounds to it.
    if abs(scale) < 2**128 - 2**103:
        flashkda.fwd(**(make() | {"scale": scale}))
    else:
        assert_refused(cuda, make(), "scale", scale, after=after)


@quietly
@given(lower_bound=NUMBERS | st.floats(-6, 1), after=st.booleans())
def test_any_lower_bound(make: Any, cuda: Any, lower_bound: Any, after: bool) -> None:
    if -5 <= lower_bound <= 0:
        flashkda.fwd(**(make() | {"lower_bound": lower_bound}))
    else:
        assert_refused(cuda, make(), "lower_bound", lower_bound, after=after)


@quietly
@given(name=st.sampled_from(["scale", "lower_bound"]), value=NO_NUMBERS, after=st.booleans())
def test_what_is_no_number(make: Any, cuda: Any, name: str, value: Any, after: bool) -> None:
    # The sound call's number compares equal to some of these.
    assert_refused(cuda, make() | {name: 0.5 if name == "scale" else -0.5}, name, value, after=after)


@quietly
@given(
    bv=st.integers() | st.floats() | st.booleans() | NO_NUMBERS.filter(lambda value: value is not None)
    | st.sampled_from([0, 16, 31, 33, 32.0, 64.0, Fraction(32), 32 + 0j, 10**5000, "32"]),
    after=st.booleans(),
)  # fmt: skip
def test_any_bv(make: Any, cuda: Any, bv: Any, after: bool) -> None:
    if type(bv) is int and bv in (32, 64, 128):
        flashkda.fwd(**(make() | {"bv": bv}))
    else:
        assert_refused(cuda, make() | {"bv": 32}, "bv", bv, after=after)


@quietly
@given(name=st.sampled_from([name for name in TENSORS if name not in ("cu_seqlens", "workspace")]), after=st.booleans())
def test_any_tensor_that_requires_grad(make: Any, on_cuda: Any, cuda: Any, name: str, after: bool) -> None:
    sound = make()
    value = on_cuda(plain(sound[name]).clone().requires_grad_().view_as(sound[name]))
    assert_refused(cuda, sound, name, value, after=after)
    with torch.no_grad():
        flashkda.fwd(**(sound | {name: value}))


@quietly
@given(
    seqlen=st.integers(0, 40), heads=st.integers(0, 3), sequences=st.integers(1, 5), present=st.sets(
        st.sampled_from(OPTIONAL)
    ), state=st.sampled_from([torch.bfloat16, torch.float32]), bv=st.sampled_from([None, 32, 64, 128]),
)  # fmt: skip
def test_every_sound_call_is_launched_with_its_own_sizes(
    make: Any, cuda: Any, seqlen: int, heads: int, sequences: int, present: set[str], state: Any, bv: int | None
) -> None:
    cuda.launches.clear()
    if "cu_seqlens" not in present:
        sequences = 1
    sound = make(seqlen=seqlen, heads=heads, sequences=sequences, state=state) | {"bv": bv}
    sound |= {name: None for name in OPTIONAL if name not in present}
    flashkda.fwd(**sound)
    tiles = seqlen // 16 + sequences if "cu_seqlens" in present else -(-seqlen // 16)
    expected = [] if not seqlen or not heads else ["entry_prepare_None"]
    if heads and (seqlen or "final_state" in present):
        expected.append(f"entry_recurrence_{bv or 32}")
    assert [launch.entry for launch in cuda.launches] == expected
    for launch in cuda.launches:
        sizes = [launch.values[name] for name in ("seqlen", "num_heads", "num_seqs", "total_tiles")]
        assert sizes == [seqlen, heads, sequences, tiles]
