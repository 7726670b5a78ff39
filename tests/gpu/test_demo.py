"""The worked example: pieces through a state pool return the bits of one call."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402

from flashkda.cli import main  # noqa: E402
from flashkda.demo import LOWER_BOUND, D, attend, make_layer, project  # noqa: E402
from flashkda.reference import kda_float64, relative_error  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("tokens", "piece"), [(5000, 1024), (100, 16), (40, 4096)])
def test_pieces_equal_one_call(tokens: int, piece: int, device) -> None:
    arguments = ["--tokens", str(tokens), "--piece", str(piece), "--device", str(device.index)]
    shown = CliRunner().invoke(main, ["demo", *arguments])
    assert shown.exit_code == 0, shown.output
    *_, last = shown.stdout.splitlines()
    assert last.startswith(f"{-(-tokens // piece)} pieces and one call: equal")


def test_the_example_computes_what_its_text_says(device) -> None:
    torch.manual_seed(1)
    with torch.inference_mode():
        layer = make_layer(256, 8, device)
        inputs = project(layer, torch.randn(1, 100, 256, dtype=torch.bfloat16, device=device))
        pool = torch.zeros(2, 8, D, D, dtype=torch.bfloat16, device=device)
        slots, resumed = torch.tensor([1], dtype=torch.int32, device=device), torch.tensor([False], device=device)
        out = attend(layer, inputs, pool, slots, resumed)
        q, k, v, g, _, beta = inputs
        wanted, state = kda_float64(q, k, v, g, beta, D**-0.5, layer.A_log, layer.dt_bias, LOWER_BOUND, [(0, 100)])
    assert relative_error(out, wanted) < 0.02
    assert relative_error(pool[1], state[0]) < 0.02
    assert not pool[0].any()
