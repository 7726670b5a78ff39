"""Times builds of the kernels beside each other, in one process and in rotating order:

    python compare_builds.py FOLDER ... [--shape 8192@6 --shape 8x1024@24] [--bv 32] [--checkpoint-every 64]

Each FOLDER is one that `flashkda-build --output` made, or one of the many of `flashkda-build tune`; FLASHKDA_ARTIFACTS
names any build, as for every use in a checkout. Prints medians in us of the first BV's prepare and of the recurrence at
each BV, one folder a line, fastest first by the sum of its recurrences. With --checkpoint-every N, shapes of one
sequence also have each recurrence with bf16 checkpoints N tokens apart ("+cp"), which count in that sum. Exits with 1
if any folder's out or final_state differs in bits from the first's; checkpoints are not compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from flashkda.artifacts import open_folder
from flashkda.bench_inputs import make_inputs
from flashkda.bench_measure import capture, time_variants
from flashkda.bench_shapes import Shape
from flashkda.bench_variants import lone_variants
from flashkda.bits import same_bits
from flashkda.driver import get_driver
from flashkda.kernels import DeviceKernels

DEFAULT = ("8192@6", "8192@24", "8192@64", "8192@96", "8x1024@24", "1300+547+2048+963+271+3063@12")


def parse(text: str) -> Shape:
    """`8192@6`, `8x1024@24` or `1300+547@12`: sequence lengths, then heads."""
    lengths, _, heads = text.partition("@")
    if "x" in lengths:
        count, length = map(int, lengths.split("x"))
        return Shape((length,) * count, int(heads))
    return Shape(tuple(map(int, lengths.split("+"))), int(heads))


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--shape", "shapes", multiple=True, default=DEFAULT, show_default=True)
@click.option("--bv", "bvs", multiple=True, type=int, help="Only these. [default: all]")
@click.option("--checkpoint-every", "every", type=int, help="Also with checkpoints so many tokens apart.")
@click.option("--samples", default=9, show_default=True)
def main(
    folders: tuple[Path, ...], shapes: tuple[str, ...], bvs: tuple[int, ...], every: int | None, samples: int
) -> None:
    device = torch.device("cuda", 0)
    builds = [DeviceKernels(get_driver(), open_folder(folder, True), 0) for folder in folders]
    stream = torch.cuda.Stream(device)
    wrong = False
    for text in shapes:
        shape = parse(text)
        its_every = every if len(shape.lengths) == 1 else None  # packed sequences would need starts
        inputs = make_inputs(shape, builds[0].manifest.contract, device, 1)
        first, owners, variants, replayables = None, [], [], []
        for number, build in enumerate(builds):
            prepare, *recurrences = lone_variants(inputs, build, bvs or tuple(build.variants.recurrence), its_every)
            for recurrence in recurrences:
                inputs[0].out.zero_()
                inputs[0].final_state.zero_()
                recurrence.run(0)  # on records that this build's prepare of its order has just made
                torch.cuda.synchronize()
                result = inputs[0].out.clone(), inputs[0].final_state.clone()
                first = first or result
                if not all(map(same_bits, result, first)):
                    click.echo(f"{text}: {folders[number].name} at BV {recurrence.bv} differs from {folders[0].name}")
                    wrong = True
            for variant in (prepare, *recurrences):
                owners.append(number)
                variants.append(variant)
                replayables.append(capture(variant.run, 1, stream))
        timed = time_variants(replayables, samples, stream, lambda: None)
        click.echo(text)
        rows = []
        for number, folder in enumerate(folders):
            mine = [
                (f"{variant.bv or variant.kernel}{'+cp' if variant.checkpoint_every else ''}", one.summary.median)
                for owner, variant, one in zip(owners, variants, timed, strict=True)
                if owner == number
            ]
            listed = "  ".join(f"{name} {us:.1f}" for name, us in mine)
            rows.append((sum(us for _, us in mine[1:]), folder.name, listed))
        for _, name, listed in sorted(rows):
            click.echo(f"  {name:20} {listed}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
