"""Builds a folder of cubins and their manifest: one process an architecture, and all files appear or none."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import Architecture
from .digest import source_digest
from .errors import BuildError
from .manifest import MANIFEST, canonical, damaged_files, describe_folder, read_manifest
from .spec import load_kernels
from .toolchain import require_dsl, worker_environment

KERNELS = "flashkda_build.kernels"
KEPT = "README.md"  # the one file in an output folder that is not ours to replace


@dataclass(frozen=True)
class Step:
    """One variant compiled: its file and the seconds it took."""

    file: str
    seconds: float


Progress = Callable[[Step], None]


def _ignore(step: Step) -> None:
    pass


class _Workers:
    """The compiling processes of one build; the first failure ends the others."""

    def __init__(self, package: str, folder: Path, progress: Progress) -> None:
        self.package, self.folder, self.progress = package, folder, progress
        self.running: list[subprocess.Popen[str]] = []
        self.failed = False

    def compile(self, arch: Architecture) -> None:
        """Compiles every variant for `arch` into the folder. Raises BuildError that names the variant and the cause."""
        if self.failed:
            return
        with ExitStack() as stack:
            dump = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashkda-dump-")))
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.compile", self.package, str(self.folder)],
                    env=worker_environment(arch, dump),
                    # The DSL may look for things in the working folder; there is nothing to find here.
                    cwd=dump,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
            self.running.append(process)
            assert process.stdout
            names = {spec.label: spec.file_name(arch.name) for spec in load_kernels(self.package)}
            failure = None
            for line in process.stdout:
                said = json.loads(line)
                if "error" in said:
                    failure = f"{names[said['label']]} did not compile:\n{said['error']}"
                else:
                    self.progress(Step(names[said["label"]], said["seconds"]))
            if process.wait() == 0 or self.failed:
                return
            self.failed = True
            for other in self.running:
                if other.poll() is None:
                    other.terminate()
            if failure is None:
                log.seek(0)
                tail = "".join(log.readlines()[-30:])
                failure = f"the compiling process for {arch.name} ended with {process.returncode}:\n{tail}"
            raise BuildError(failure.rstrip())


def compile_into(
    folder: Path,
    architectures: tuple[Architecture, ...],
    *,
    package: str = KERNELS,
    jobs: int = 2,
    progress: Progress = _ignore,
) -> dict[str, Any]:
    """Compiles `package` for `architectures` into the existing `folder`; writes the manifest there and returns it.

    jobs: how many compiling processes run at once, at least 1. Raises BuildError.
    """
    require_dsl()
    workers = _Workers(package, folder, progress)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for done in [pool.submit(workers.compile, arch) for arch in architectures]:
            done.result()
    manifest = describe_folder(folder, package, architectures)
    (folder / MANIFEST).write_text(canonical(manifest), encoding="utf-8")
    return manifest


def up_to_date(output: Path, architectures: tuple[Architecture, ...], package: str) -> bool:
    """Whether `output` already holds, undamaged, what a build for `architectures` would put there."""
    try:
        manifest = read_manifest(output / MANIFEST)
        if manifest["source_digest"] != source_digest(package):
            return False
        return manifest == describe_folder(output, package, architectures) and not damaged_files(output, manifest)
    except (BuildError, OSError, KeyError):
        return False


def _refuse_foreign(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise BuildError(f"output {output} is not a folder; name a folder, or a path that does not exist yet")
    foreign = sorted(p.name for p in output.iterdir() if p.suffix != ".cubin" and p.name not in (MANIFEST, KEPT))
    if foreign:
        raise BuildError(
            f"output {output} holds files that a build did not put there ({', '.join(foreign[:5])}). "
            "The whole folder is replaced, so name an empty or a new one."
        )


def build(
    output: Path,
    architectures: tuple[Architecture, ...],
    *,
    package: str = KERNELS,
    jobs: int = 2,
    force: bool = False,
    progress: Progress = _ignore,
) -> tuple[dict[str, Any], bool]:
    """Makes `output` hold exactly the cubins for `architectures` and their manifest; -> (manifest, compiled or not).

    Nothing is compiled when the folder is up to date, unless `force`. On any failure (BuildError) it stays as it was.
    """
    output = output.absolute()
    _refuse_foreign(output)
    if not force and up_to_date(output, architectures, package):
        return read_manifest(output / MANIFEST), False
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        manifest = compile_into(new, architectures, package=package, jobs=jobs, progress=progress)
        if (output / KEPT).exists():
            shutil.copy2(output / KEPT, new / KEPT)
        if output.exists():
            output.rename(old)
        try:
            new.rename(output)
        except OSError:
            if old.exists():
                old.rename(output)
            raise
    return manifest, True
