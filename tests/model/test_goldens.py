"""The shipped goldens: inputs, digests, record layout and float64 yardstick, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import recorded
from recorded import RECORD

from flashkda.goldens.cases import CASES, CHUNK, Case, case_named
from flashkda.goldens.digests import load_digests, sha256
from flashkda.goldens.inputs import inputs_sha256, make_inputs
from flashkda.goldens.record import as_recorded, decode_records, encode_records, plain_shape, stored_order, tile_bases
from flashkda.manifest import RECORD_ORDERS


def test_there_are_sixty_cases_each_with_digests() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 60
    assert set(load_digests()) == {case.name for case in CASES}


@pytest.mark.parametrize("case", [case for case in CASES if case.T < 1000], ids=lambda case: case.name)
def test_inputs_are_generated_bit_for_bit(case: Case) -> None:
    assert inputs_sha256(make_inputs(case)) == load_digests()[case.name].inputs


def test_digests_tell_one_changed_bit_apart() -> None:
    inputs = make_inputs(case_named("t1_h1"))
    inputs["g"][0, 0, 0, 5] ^= 1
    assert inputs_sha256(inputs) != load_digests()["t1_h1"].inputs


@pytest.mark.parametrize("name", recorded.NAMES)
def test_stored_arrays_are_the_goldens(name: str) -> None:
    _, arrays = recorded.load(name)
    digests = load_digests()[name]
    assert sha256(arrays["out"]) == digests.out
    assert ("final_state" in arrays) == (digests.final_state is not None)
    if digests.final_state is not None:
        assert sha256(arrays["final_state"]) == digests.final_state
    assert {key: sha256(arrays[key]) for key in recorded.WORKSPACE} == digests.workspace


def test_stored_goldens_stay_small() -> None:
    assert sum(file.stat().st_size for file in recorded.FOLDER.glob("*.npz")) <= 2_000_000


@pytest.mark.parametrize("order", RECORD_ORDERS)
@pytest.mark.parametrize("name", recorded.NAMES)
def test_records_in_the_kernels_layout_come_back_as_recorded(name: str, order: str) -> None:
    case, arrays = recorded.load(name)
    bases, tiles = tile_bases(case)
    ours = {}
    for field in RECORD.fields:
        dtype = np.uint32 if field.dtype == "fp32" else np.uint16
        # Tiles of no sequence, and rows past a sequence's end, hold anything at all.
        ours[field.name] = np.full((case.H, tiles, *plain_shape(field.name, field.shape)), 0x1234, dtype=dtype)
    for field in recorded.WORKSPACE:
        first = 0
        for base, (start, end) in zip(bases, case.sequences, strict=True):
            count = -(-(end - start) // CHUNK)
            ours[field][:, base : base + count] = arrays[field][:, first : first + count]
            first += count
            if (end - start) % CHUNK and field in ("q_decayed", "mqk"):
                ours[field][:, base + count - 1, (end - start) % CHUNK :] = 0x4321
    flat = {key: array.reshape(case.H * tiles, *array.shape[2:]) for key, array in ours.items()}
    raw = encode_records(flat, RECORD, order)
    assert raw.size == case.H * tiles * RECORD.bytes
    again = as_recorded(case, decode_records(raw, RECORD, order))
    assert {key: sha256(array) for key, array in again.items()} == load_digests()[name].workspace


def stored(order: str, field: str, byte: int) -> tuple[int, ...]:
    """The index in a field's array of what lies at this byte of the field."""
    raw = np.zeros(RECORD.bytes, dtype=np.uint8)
    offset = next(entry.offset for entry in RECORD.fields if entry.name == field)
    raw.view(np.uint16)[(offset + byte) // 2] = 1
    where = np.argwhere(decode_records(raw, RECORD, order)[field][0])
    assert len(where) == 1
    return tuple(int(index) for index in where[0])


def matrix(m: int, lane: int, r: int, e: int) -> int:
    """The byte of block m, lane 4a + t, word r, half e."""
    return m * 512 + lane * 16 + r * 4 + e * 2


def test_record_positions_are_those_of_mma_fragments_of_operand_b() -> None:
    assert stored("b", "k_decayed", matrix(3, 4 * 5 + 2, 3, 1)) == (5 + 8, 16 * 3 + 4 * 2 + 2 + 1)
    assert stored("b", "k_decayed", matrix(3, 4 * 5 + 2, 1, 1)) == (5, 16 * 3 + 4 * 2 + 2 + 1)
    assert stored("b", "q_decayed", matrix(0, 4 * 1 + 3, 0, 1)) == (1, 4 * 3 + 1)
    assert stored("b", "k_restored", matrix(7, 4 * 5 + 2, 3, 0)) == (2 * 2 + 8, 16 * 7 + 4 * 2 + 2 + 1)
    assert stored("b", "k_restored", matrix(7, 4 * 5 + 2, 1, 0)) == (2 * 2 + 8, 16 * 7 + 4 * 2 + 1)
    assert stored("b", "g_total", 4 * 77) == (77,)
    # the lower blocks, 8 bytes a lane, then the corner, 4 bytes a lane
    assert stored("b", "inv", (4 * 6 + 1) * 8 + 2) == (6 + 8, 2 + 1)
    assert stored("b", "mqk", (4 * 6 + 1) * 8 + 4) == (6 + 8, 2 + 8)
    assert stored("b", "mqk", 256 + (4 * 6 + 1) * 4) == (6, 2)
    assert stored("b", "beta_sigmoid", 2 * (4 * 3 + 2 * 1 + 1)) == (2 * 3 + 1 + 8,)


def test_record_positions_are_those_of_mma_fragments_of_operand_a() -> None:
    # words 1 and 2 have changed places: down the rows first
    assert stored("a", "k_decayed", matrix(3, 4 * 5 + 2, 3, 1)) == (5 + 8, 16 * 3 + 4 * 2 + 2 + 1)
    assert stored("a", "k_decayed", matrix(3, 4 * 5 + 2, 1, 1)) == (5 + 8, 16 * 3 + 4 * 2 + 1)
    assert stored("a", "q_decayed", matrix(0, 4 * 1 + 3, 2, 1)) == (1, 4 * 3 + 2 + 1)
    assert stored("a", "k_restored", matrix(7, 4 * 5 + 2, 1, 0)) == (2 * 2, 16 * 7 + 4 * 2 + 2 + 1)
    assert stored("a", "k_restored", matrix(7, 4 * 5 + 2, 2, 0)) == (2 * 2 + 8, 16 * 7 + 4 * 2 + 1)
    # of two blocks at a time a lane's four words: channels i and i + 2 of one, then of the other
    assert [stored("a", "g_total", 128 * 3 + 16 * (2 * 2 + 1) + 4 * word) for word in range(4)] == [
        (16 * block + 4 * 2 + 1 + 2 * j,) for block in (6, 7) for j in (0, 1)
    ]
    # the blocks of columns 0 ... 7, 8 bytes a lane, then the other one, 4 bytes a lane
    assert stored("a", "inv", (4 * 6 + 1) * 8 + 2) == (6, 2 + 1)
    assert stored("a", "mqk", (4 * 6 + 1) * 8 + 4) == (6 + 8, 2)
    assert stored("a", "mqk", 256 + (4 * 6 + 1) * 4) == (6 + 8, 2 + 8)
    assert stored("a", "beta_sigmoid", 2 * (2 * 5 + 1)) == (5 + 8,)


@pytest.mark.parametrize("order", RECORD_ORDERS)
def test_every_element_of_a_field_has_one_place(order: str) -> None:
    for field in RECORD.fields:
        places = stored_order(field.name, field.shape, order)
        assert len(set(places.tolist())) == len(places) == np.prod(field.shape)
        assert places.max() < np.prod(plain_shape(field.name, field.shape))


def test_tile_bases_leave_room_for_every_sequence() -> None:
    for case in CASES:
        bases, tiles = tile_bases(case)
        ends = [base + -(-(end - start) // CHUNK) for base, (start, end) in zip(bases, case.sequences, strict=True)]
        assert all(end <= following for end, following in zip(ends, [*bases[1:], tiles], strict=True))


def test_a_poison_may_change_its_own_sequence_and_head_only() -> None:
    region = case_named("nan_v_in_tail").may_differ_from_clean()
    assert region is not None
    assert (region.sequence, region.head, region.start, region.end) == (1, 0, 20, 50)
    query = case_named("inf_q").may_differ_from_clean()
    assert query is not None
    assert (query.sequence, query.head, query.start, query.end) == (-1, 1, 24, 25)
    batch = case_named("nan_v_batch").may_differ_from_clean()
    assert batch is not None
    assert (batch.sequence, batch.head, batch.start, batch.end) == (1, 0, 20, 40)
    assert case_named("same_k").may_differ_from_clean() is None


@pytest.mark.parametrize("name", recorded.NAMES)
def test_float64_reference_has_the_recorded_distance(name: str) -> None:
    torch = pytest.importorskip("torch")
    from flashkda.reference import kda_float64, relative_error

    case, arrays = recorded.load(name)

    def tensor(array: np.ndarray) -> object:
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array.view(np.float32) if array.dtype == np.uint32 else array)

    t = {key: tensor(array) for key, array in make_inputs(case).items()}
    out, state = kda_float64(
        t["q"], t["k"], t["v"], t["g"], t["beta"], case.scale, t["A_log"], t["dt_bias"], case.lower_bound,
        case.sequences, t.get("initial_state"),
    )  # fmt: skip
    digests = load_digests()[name]
    assert relative_error(tensor(arrays["out"]), out) == pytest.approx(digests.rel_out, rel=1e-4)
    if case.has_final:
        assert relative_error(tensor(arrays["final_state"]), state) == pytest.approx(digests.rel_final_state, rel=1e-4)


def test_digests_file_is_plain_and_small() -> None:
    import flashkda.goldens

    path = Path(flashkda.goldens.__file__).parent / "digests.json"
    assert path.stat().st_size < 100_000
    assert json.loads(path.read_text(encoding="utf-8"))["gpu"] == "NVIDIA H200"
