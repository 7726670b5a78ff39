"""From a problem's numbers to the two launches."""

import struct

import pytest

from flashkda.errors import ArgumentError, ArtifactError
from flashkda.manifest import Artifact, Manifest
from flashkda.planner import INT32_MAX, Problem, make_plan, workspace_bound
from flashkda.resolver import Variants, resolve_variants

H200 = 132


@pytest.fixture(scope="session")
def variants(manifest: Manifest) -> Variants:
    found = resolve_variants(manifest, numerics="flashkda", compute_capability="9.0", driver_version=12090)
    assert isinstance(found, Variants)
    return found


def make_problem(
    batch: int = 1, seqlen: int = 100, heads: int = 4, sequences: int | None = None, **rest: object
) -> Problem:
    strides = (seqlen * heads * 128, heads * 128, 128)
    problem = Problem(
        batch=batch, seqlen=seqlen, heads=heads, sequences=batch if sequences is None else sequences,
        packed=sequences is not None, cu_seqlens_is_int64=False,
        q_strides=strides, k_strides=strides, v_strides=strides, g_strides=strides, out_strides=strides,
        beta_strides=(seqlen * heads, heads, 1), initial_stride=0, final_stride=0, initial_dtype=0, final_dtype=0,
        scale=128**-0.5, lower_bound=-5.0, bv=None,
    )  # fmt: skip
    return problem._replace(**rest)


def unpack(artifact: Artifact, block: bytes) -> dict[str, float]:
    forms = {"pointer": "Q", "i64": "q", "i32": "i", "f32": "f"}
    return {
        found.name: struct.unpack_from("<" + forms[found.type], block, found.offset)[0] for found in artifact.parameters
    }


@pytest.mark.parametrize(
    ("sequences", "heads", "bv"),
    [
        (1, 1, 16), (1, 16, 16), (1, 17, 32), (1, 33, 32), (1, 34, 64), (1, 66, 64), (1, 67, 128), (1, 96, 128),
        (2, 8, 16), (6, 6, 64), (8, 96, 128),
    ],
)  # fmt: skip
def test_bv_is_the_smallest_that_gives_each_cta_an_sm(
    manifest: Manifest, variants: Variants, sequences: int, heads: int, bv: int
) -> None:
    plan = make_plan(make_problem(batch=sequences, heads=heads), manifest.contract, variants, H200)
    assert plan.bv == bv
    assert plan.recurrence is not None
    assert plan.recurrence.artifact.bv == bv
    assert plan.recurrence.grid == sequences * heads * 128 // bv


@pytest.mark.parametrize(
    ("sequences", "heads", "bv"),
    [
        (6, 3, 16), (6, 4, 32), (2, 9, 16), (2, 10, 32), (6, 6, 32), (2, 18, 32), (2, 19, 64), (8, 6, 64), (6, 12, 64),
        (8, 12, 128), (6, 24, 64), (8, 24, 128), (6, 96, 128), (64, 96, 128),
    ],
)  # fmt: skip
def test_a_packed_call_counts_on_its_lengths_to_differ(
    manifest: Manifest, variants: Variants, sequences: int, heads: int, bv: int
) -> None:
    assert make_plan(make_problem(heads=heads, sequences=sequences), manifest.contract, variants, H200).bv == bv


def test_sequences_of_one_length_get_the_smallest_bv_whose_grid_fits(manifest: Manifest, variants: Variants) -> None:
    for heads in range(1, 600):
        fitting = [bv for bv in (16, 32, 64, 128) if heads * 128 // bv <= H200]
        for problem in (make_problem(heads=heads), make_problem(heads=heads, sequences=1)):
            plan = make_plan(problem, manifest.contract, variants, H200)
            assert plan.bv == (fitting[0] if fitting else 128)


@pytest.mark.parametrize("bv", [16, 32, 64, 128])
def test_a_requested_bv_wins_over_the_rule(manifest: Manifest, variants: Variants, bv: int) -> None:
    assert make_plan(make_problem(heads=96, bv=bv), manifest.contract, variants, H200).bv == bv


@pytest.mark.parametrize("bv", [0, 8, 256, -32])
def test_a_bv_that_was_not_compiled_is_refused_with_the_choice(manifest: Manifest, variants: Variants, bv: int) -> None:
    with pytest.raises(ArgumentError, match="16, 32, 64, 128"):
        make_plan(make_problem(bv=bv), manifest.contract, variants, H200)


def test_the_choice_of_bv_comes_from_the_variants_alone(manifest: Manifest, variants: Variants) -> None:
    narrow = variants.recurrence[32]._replace(bv=8)
    more = Variants(variants.prepare, {8: narrow, **variants.recurrence})
    assert make_plan(make_problem(heads=8), manifest.contract, more, H200).bv == 8
    only = Variants(variants.prepare, {64: variants.recurrence[64]})
    assert make_plan(make_problem(heads=1), manifest.contract, only, H200).bv == 64
    assert make_plan(make_problem(heads=96), manifest.contract, only, H200).bv == 64


@pytest.mark.parametrize(("bv", "order"), [(16, "a"), (32, "b"), (64, "b"), (128, "b"), (None, "a")])
def test_prepare_writes_records_in_the_order_that_the_recurrence_reads(
    manifest: Manifest, variants: Variants, bv: int | None, order: str
) -> None:
    plan = make_plan(make_problem(bv=bv), manifest.contract, variants, H200)
    assert plan.prepare is not None and plan.recurrence is not None
    assert plan.prepare.artifact == variants.prepare[order]
    assert plan.recurrence.artifact.record_order == order


@pytest.mark.parametrize(
    ("problem", "tiles"),
    [
        (make_problem(seqlen=16), 1),
        (make_problem(seqlen=17), 2),
        (make_problem(batch=3, seqlen=100), 21),
        (make_problem(seqlen=100, sequences=1), 7),
        (make_problem(seqlen=96, sequences=5), 11),
    ],
)
def test_tiles_grid_and_workspace(manifest: Manifest, variants: Variants, problem: Problem, tiles: int) -> None:
    plan = make_plan(problem, manifest.contract, variants, H200)
    assert plan.total_tiles == tiles
    assert plan.workspace_bytes == tiles * 4 * 13600
    assert plan.prepare is not None
    assert plan.prepare.grid == 4 * -(-tiles // 4)  # 4 heads, 4 tiles of a head a CTA


def test_prepares_grid_covers_a_last_partial_cta(manifest: Manifest, variants: Variants) -> None:
    plan = make_plan(make_problem(seqlen=80, heads=3), manifest.contract, variants, H200)
    assert plan.prepare is not None
    assert plan.prepare.grid == 3 * 2  # 5 tiles a head, 4 a CTA, and no CTA has tiles of two heads


def test_the_bound_suffices_for_both_layouts(manifest: Manifest, variants: Variants) -> None:
    for sequences in (1, 2, 3, 7):
        for seqlen in range(1, 70):
            bound = workspace_bound(sequences * seqlen, 2, sequences, manifest.contract)
            fixed = make_problem(batch=sequences, seqlen=seqlen, heads=2)
            packed = make_problem(seqlen=sequences * seqlen, heads=2, sequences=sequences)
            assert bound >= make_plan(fixed, manifest.contract, variants, H200).workspace_bytes
            assert bound == make_plan(packed, manifest.contract, variants, H200).workspace_bytes


def test_parameter_blocks_hold_every_scalar_and_null_pointers(manifest: Manifest, variants: Variants) -> None:
    problem = make_problem(
        seqlen=50, heads=6, sequences=3, cu_seqlens_is_int64=True, q_strides=(1, 2, 3), k_strides=(4, 5, 6),
        g_strides=(7, 8, 9), beta_strides=(10, 11, 12), v_strides=(13, 14, 15), out_strides=(16, 17, 2**40),
        initial_stride=98304, final_stride=98305, initial_dtype=1, final_dtype=2, scale=0.1, lower_bound=-4.9,
    )  # fmt: skip
    plan = make_plan(problem, manifest.contract, variants, H200)
    assert plan.prepare is not None and plan.recurrence is not None
    prepare = unpack(plan.prepare.artifact, plan.prepare.parameters)
    assert [prepare[f"{name}_stride_{dim}"] for name in ("q", "k", "g", "beta") for dim in "bth"] == list(range(1, 13))
    assert (prepare["q"], prepare["workspace"], prepare["seqlen"], prepare["num_seqs"]) == (0, 0, 50, 3)
    assert (prepare["num_heads"], prepare["total_tiles"], prepare["cu_seqlens_is_int64"]) == (6, 6, 1)
    assert prepare["scale"] == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    recurrence = unpack(plan.recurrence.artifact, plan.recurrence.parameters)
    assert recurrence["out_stride_h"] == 2**40
    assert (recurrence["initial_stride_n"], recurrence["final_stride_n"]) == (98304, 98305)
    assert (recurrence["initial_dtype"], recurrence["final_dtype"]) == (1, 2)


def test_pools_and_checkpoints_are_scalars_of_the_recurrence(manifest: Manifest, variants: Variants) -> None:
    names = (
        "state_indices_is_int64", "num_slots", "checkpoint_stride_n", "checkpoint_dtype", "num_checkpoints",
        "checkpoint_chunks", "checkpoint_starts_is_int64",
    )  # fmt: skip

    def scalars(problem: Problem) -> list[float]:
        launch = make_plan(problem, manifest.contract, variants, H200).recurrence
        assert launch is not None
        found = unpack(launch.artifact, launch.parameters)
        return [found[name] for name in names]

    with_both = make_problem(
        slots=70, state_indices_is_int64=True, checkpoints=9, checkpoint_stride=2**33, checkpoint_dtype=2,
        checkpoint_every=64, checkpoint_starts_is_int64=True,
    )  # fmt: skip
    assert scalars(with_both) == [1, 70, 2**33, 2, 9, 4, 1]
    assert scalars(make_problem()) == [0] * 7


def test_gate_scale_is_a_float64_product_rounded_once(manifest: Manifest, variants: Variants) -> None:
    # At this bound the product of two float32 factors is another float32.
    plan = make_plan(make_problem(lower_bound=-0.01), manifest.contract, variants, H200)
    assert plan.prepare is not None
    value = unpack(plan.prepare.artifact, plan.prepare.parameters)["gate_scale"]
    assert value == struct.unpack("<f", struct.pack("<f", -0.01 * 1.4426950408889634))[0]


@pytest.mark.parametrize(
    ("problem", "launches_recurrence"),
    [
        (make_problem(batch=0), False),
        (make_problem(heads=0), False),
        (make_problem(heads=0, final_dtype=1), False),
        (make_problem(batch=0, final_dtype=1), False),
        (make_problem(seqlen=0), False),
        (make_problem(batch=2, seqlen=0, final_dtype=1), True),
        (make_problem(seqlen=0, sequences=3, final_dtype=2), True),
    ],
)
def test_without_tokens_nothing_is_prepared_and_only_states_are_written(
    manifest: Manifest, variants: Variants, problem: Problem, launches_recurrence: bool
) -> None:
    plan = make_plan(problem, manifest.contract, variants, H200)
    assert plan.prepare is None
    assert plan.workspace_bytes == 0
    assert (plan.recurrence is not None) == launches_recurrence


@pytest.mark.parametrize(
    "problem",
    [
        make_problem(seqlen=INT32_MAX + 1, heads=1),
        make_problem(seqlen=16, heads=INT32_MAX + 1),
        make_problem(batch=INT32_MAX + 1, seqlen=0, heads=1),
        make_problem(seqlen=2**31 - 16, heads=32),
        make_problem(batch=2**16, seqlen=16, heads=2**15 - 1, bv=32),
        make_problem(slots=INT32_MAX + 1),
        make_problem(checkpoints=INT32_MAX + 1),
    ],
)
def test_numbers_past_32_bits_are_refused(manifest: Manifest, variants: Variants, problem: Problem) -> None:
    with pytest.raises(ArgumentError, match=str(INT32_MAX)):
        make_plan(problem, manifest.contract, variants, H200)


def test_kernels_with_other_parameters_are_refused(manifest: Manifest, variants: Variants) -> None:
    prepare = variants.prepare["a"]
    first, second, *rest = prepare.parameters
    swapped = (second._replace(offset=0), first._replace(offset=8), *rest)
    lacking = prepare.parameters[:-1]
    retyped = (*prepare.parameters[:-1], prepare.parameters[-1]._replace(type="i32"))
    for parameters in (swapped, lacking, retyped):
        other = Variants({"a": prepare._replace(parameters=parameters)}, variants.recurrence)
        with pytest.raises(ArtifactError, match="agree"):
            make_plan(make_problem(), manifest.contract, other, H200)
