"""The search for the recurrence's schedules: builds that differ in nothing else, to be timed on a GPU.

ptxas's choice of registers decides more about a chunk's time than any rule for ordering its instructions, and nothing
short of a measurement tells. After a change of the recurrence: `flashkda-build tune`, tests/gpu/compare_builds.py on
the chip, and the fastest schedules into kernels/layout.py.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from .architectures import Architecture
from .build import KERNELS, Progress, Step
from .compile import compile_kernel
from .errors import BuildError
from .kernels import layout
from .kernels.record import HEAD_DIM
from .manifest import MANIFEST, canonical, describe_folder
from .spec import load_kernels
from .toolchain import require_dsl, worker_environment

SCHEDULE = "schedules.json"
_CHOICES = {
    "early": (4, 4, 5, 6),
    "defer": (0, 0, 1, 2),
    "lead": (2, 3, 4, 5, 7),
    "ahead": (0, 1, 2, 3, 5, 7),
    "lag": (1, 1, 2),
    "mqk": (0, 1, 2, 3),
    "small_loads": (2, 3, 4, 5),
    "barrier": (-1, 0, 1, 2),
    "store": (3, 4, 5, 6, 7),
    "checkpoint": (0, 1, 2, 3, 5),
}


def candidates(seed: int) -> Iterator[dict[int, layout.Schedule]]:
    """Schedules by BV: first those in use, then random ones without end. The launch bound of BV 128 is its design."""
    in_use = dict(layout.SCHEDULES)
    yield in_use
    choose = random.Random(seed)
    while True:
        found = {}
        for bv, present in in_use.items():
            drawn = {name: choose.choice(values) for name, values in _CHOICES.items()}
            bound = present.launch_bound if bv == HEAD_DIM else choose.choice((1, 2, 3, 4))
            found[bv] = replace(present, **drawn, launch_bound=bound)
        yield found


def tune(output: Path, arch: Architecture, count: int, seed: int, progress: Progress) -> list[Path]:
    """Build `count` candidates for `arch` into output/000, 001, ...; -> those folders, each loadable like artifacts/.

    Beside the manifest each holds its schedules (SCHEDULE, JSON by BV). Raises BuildError.
    """
    require_dsl()
    if output.exists() and any(output.iterdir()):
        raise BuildError(f"output {output} is not empty; name an empty folder, or a path that does not exist yet")
    folders = [output / f"{number:03}" for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="flashkda-dump-") as dump:
        done = subprocess.Popen(
            [sys.executable, "-m", __name__, str(output.absolute()), str(count), str(seed)],
            env=worker_environment(arch, Path(dump)), cwd=dump, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        assert done.stdout
        said = []
        for line in done.stdout:
            if line.startswith("done "):
                _, number, seconds = line.split()
                progress(Step(number, float(seconds)))
            else:
                said.append(line)
        if done.wait():
            raise BuildError(f"the compiling process ended with {done.returncode}:\n{''.join(said[-30:])}".rstrip())
    for folder in folders:
        manifest = describe_folder(folder, KERNELS, (arch,))
        (folder / MANIFEST).write_text(canonical(manifest), encoding="utf-8")
    return folders


def _compile(output: Path, count: int, seed: int) -> None:
    """What the compiling process does; needs toolchain.worker_environment."""
    arch = os.environ["CUTE_DSL_ARCH"]
    for number, schedules in zip(range(count), candidates(seed), strict=False):
        start = time.monotonic()
        folder = output / f"{number:03}"
        layout.SCHEDULES.update(schedules)
        for spec in load_kernels(KERNELS):
            # The other kernels do not change.
            first = output / "000" / spec.file_name(arch)
            same = spec.bv is None and number > 0
            (folder / spec.file_name(arch)).write_bytes(first.read_bytes() if same else compile_kernel(spec))
        by_bv = {bv: asdict(schedule) for bv, schedule in schedules.items()}
        (folder / SCHEDULE).write_text(json.dumps(by_bv, indent=2) + "\n", encoding="utf-8")
        print("done", folder.name, f"{time.monotonic() - start:.2f}", flush=True)


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
