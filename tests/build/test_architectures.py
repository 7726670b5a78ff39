import pytest

from flashkda_build.architectures import ARCHITECTURES, parse_architecture, parse_architectures
from flashkda_build.errors import BuildError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_90a", "sm_90a"),
        ("sm_90", "sm_90a"),
        ("H100", "sm_90a"),
        ("h200", "sm_90a"),
        ("9.0", "sm_90a"),
        ("sm_100", "sm_100a"),
        ("100a", "sm_100a"),
        ("100", "sm_100a"),
        ("sm100a", "sm_100a"),
        ("b200", "sm_100a"),
        ("10.3", "sm_103a"),
        (" GB300 ", "sm_103a"),
    ],
)
def test_loose_names_resolve_to_the_exact_target(text, name):
    assert parse_architecture(text).name == name


@pytest.mark.parametrize("text", ["", "sm_", "sm_80", "90.0", "sm_100f", "sm_90aa", "a100", "10", "-90"])
def test_unknown_names_are_refused_with_the_known_ones(text):
    with pytest.raises(BuildError, match=r"sm_90a.*sm_100a.*sm_103a") as error:
        parse_architecture(text)
    assert repr(text) in str(error.value)


def test_several_come_in_table_order_without_repeats():
    assert [a.name for a in parse_architectures(("b200", "h100", "sm_100a"))] == ["sm_90a", "sm_100a"]
    assert parse_architectures(()) == ARCHITECTURES


def test_no_two_rows_claim_the_same_chip():
    claimed = [capability for a in ARCHITECTURES for capability in a.compute_capabilities]
    products = [product for a in ARCHITECTURES for product in a.products]
    assert len(set(claimed)) == len(claimed)
    assert len(set(products)) == len(products)
