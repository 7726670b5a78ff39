"""Times builds of the kernels beside each other, in one process and in rotating order:

    python compare_builds.py FOLDER ... [--shape 8192@6 --shape 8x1024@24 --shape 1300+547+2048@12] [--bv 32]

Each FOLDER is one that `flashkda-build --output` made, or one of the many of `flashkda-build tune`; FLASHKDA_ARTIFACTS
names any build, as for every use in a checkout. Prints medians in us of prepare and of the recurrence at each BV, one
folder a line, fastest first by the sum of its recurrences; exits with 1 if any folder's out or final_state differs in
bits from the first's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from flashkda.arguments import TENSORS, check
from flashkda.artifacts import open_folder
from flashkda.bench_inputs import LOWER_BOUND, make_inputs
from flashkda.bench_measure import capture, time_variants
from flashkda.bench_shapes import Shape
from flashkda.driver import LEGACY_STREAM, Kernel, get_driver
from flashkda.goldens.run import same_bits
from flashkda.kernels import device_kernels
from flashkda.planner import PREPARE_POINTERS, RECURRENCE_POINTERS, make_plan
from flashkda.resolver import DEFAULT_NUMERICS, resolve_variants

DEFAULT = ("8192@6", "8192@24", "8192@64", "8192@96", "8x1024@24", "1300+547+2048+963+271+3063@12")


def parse(text: str) -> Shape:
    """`8192@6`, `8x1024@24` or `1300+547@12`: sequence lengths, then heads."""
    lengths, _, heads = text.partition("@")
    if "x" in lengths:
        count, length = map(int, lengths.split("x"))
        return Shape((length,) * count, int(heads))
    return Shape(tuple(map(int, lengths.split("+"))), int(heads))


class Build:
    """A folder's kernels on device 0."""

    def __init__(self, path: Path, device) -> None:
        self.name = path.name
        folder, driver = open_folder(path, True), get_driver()
        self.contract = folder.manifest.contract
        self.variants = resolve_variants(
            folder.manifest,
            numerics=DEFAULT_NUMERICS,
            compute_capability=device.facts.compute_capability,
            driver_version=driver.version,
        )
        self.loaded = {}
        for artifact in (self.variants.prepare, *self.variants.recurrence.values()):
            self.loaded[artifact.file] = Kernel(driver, artifact, folder.read(artifact))
            self.loaded[artifact.file].finish_on(device.facts.ordinal)

    def plan(self, inputs, bv, sm_count):
        tensors = [getattr(inputs, name) for name in TENSORS]
        problem = check(self.contract, tensors, inputs.scale, LOWER_BOUND, bv).problem
        return make_plan(problem, self.contract, self.variants, sm_count)

    def runner(self, launch, names, inputs):
        kernel = self.loaded[launch.artifact.file]
        tensors = [getattr(inputs, name, None) for name in names]
        pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

        def run(index: int) -> None:
            stream = torch._C._cuda_getCurrentRawStream(0) or LEGACY_STREAM
            kernel.launch(launch.grid, stream, launch.parameters, pointers, False)

        return run


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--shape", "shapes", multiple=True, default=DEFAULT, show_default=True)
@click.option("--bv", "bvs", multiple=True, type=int, help="Only these. [default: all]")
@click.option("--samples", default=9, show_default=True)
def main(folders: tuple[Path, ...], shapes: tuple[str, ...], bvs: tuple[int, ...], samples: int) -> None:
    torch.zeros(1, device="cuda")
    device = device_kernels(0)
    builds = [Build(folder, device) for folder in folders]
    stream = torch.cuda.Stream()
    wrong = False
    for text in shapes:
        inputs = make_inputs(parse(text), builds[0].contract, torch.device("cuda", 0), 1)[0]
        names, runs, first = [], [], None
        for number, build in enumerate(builds):
            for bv in bvs or build.variants.recurrence:
                plan = build.plan(inputs, bv, device.facts.sm_count)
                prepare = build.runner(plan.prepare, PREPARE_POINTERS, inputs)
                recurrence = build.runner(plan.recurrence, RECURRENCE_POINTERS, inputs)
                inputs.out.zero_()
                inputs.final_state.zero_()
                prepare(0)
                recurrence(0)
                torch.cuda.synchronize()
                result = inputs.out.clone(), inputs.final_state.clone()
                first = first or result
                if not all(map(same_bits, result, first)):
                    click.echo(f"{text}: {build.name} at BV {bv} differs in bits from {builds[0].name}")
                    wrong = True
                if (number, "prepare") not in names:
                    names.append((number, "prepare"))
                    runs.append(capture(prepare, 1, stream))
                names.append((number, bv))
                runs.append(capture(recurrence, 1, stream))
        timed = time_variants(runs, samples, stream, lambda: None)
        us = {name: one.summary.median for name, one in zip(names, timed, strict=True)}
        click.echo(text)
        rows = []
        for number, build in enumerate(builds):
            mine = {kernel: value for (owner, kernel), value in us.items() if owner == number}
            listed = "  ".join(f"{kernel} {value:.1f}" for kernel, value in mine.items())
            rows.append((sum(value for kernel, value in mine.items() if kernel != "prepare"), build.name, listed))
        for _, name, listed in sorted(rows):
            click.echo(f"  {name:20} {listed}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
