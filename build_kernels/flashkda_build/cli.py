"""`flashkda-build`: compiles the cubins, shows what was built, rebuilds and compares, audits the machine code."""

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from flashkda import __version__

from .architectures import ARCHITECTURES, parse_architectures
from .audit import Variant
from .audit import audit as audit_folder
from .build import KERNELS, Progress, Step, build, compile_into
from .cubin import read_cubin
from .errors import BuildError
from .manifest import MANIFEST, damaged_files, differences, read_manifest
from .sass import AUDITED
from .spec import load_kernels
from .tune import tune as tune_schedules

Row = Iterable[object]


@dataclass(frozen=True)
class Project:
    """What the commands work on. kernels: package with KERNELS. expectations: module with EXPECTATIONS."""

    kernels: str = KERNELS
    expectations: str = "flashkda_build.expectations"


class _Group(click.Group):
    """Turns BuildError into a message and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BuildError as error:
            raise click.ClickException(str(error)) from error


def _table(head: Row, rows: Iterable[Row]) -> None:
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _dump(report: object) -> None:
    click.echo(json.dumps(report, indent=2, sort_keys=True))


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on a terminal, one line a variant elsewhere; on stderr, so that a report on stdout stays clean."""
    if sys.stderr.isatty():
        with click.progressbar(
            length=total, label="compiling", file=sys.stderr, item_show_func=lambda file: file
        ) as bar:
            yield lambda step: bar.update(1, step.file)
        return
    done = 0

    def line(step: Step) -> None:
        nonlocal done
        done += 1
        click.echo(f"[{done}/{total}] {step.file}  {step.seconds:.1f} s", err=True)

    yield line


_arch = click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="Only this architecture: sm_90a, sm_100, 100a, b200, ... Repeatable. [default: all]",
)
_jobs = click.option(
    "--jobs", type=click.IntRange(min=1), default=lambda: min(os.cpu_count() or 1, len(ARCHITECTURES)),
    show_default="one a core", help="Compiling processes at once.",
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")
_folder = Path("artifacts")


@click.group(cls=_Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_arch
@click.option(
    "--output", type=click.Path(path_type=Path), default=_folder, show_default=True, help="Folder to (re)place."
)
@_jobs
@click.option("--force", is_flag=True, help="Compile even if the output is up to date.")
@click.option("--release", is_flag=True, help="Also copy the manifest to manifests/VERSION.json.")
@_json
@click.version_option(__version__)
@click.pass_context
def main(
    ctx: click.Context, archs: tuple[str, ...], output: Path, jobs: int, force: bool, release: bool, as_json: bool
) -> None:
    """Compile every kernel for every architecture into artifacts/ and write artifacts/manifest.json.

    Run it in the root of a checkout. Needs no GPU, no CUDA toolkit and no network.
    """
    project = ctx.ensure_object(Project)
    if ctx.invoked_subcommand is not None:
        given = [
            name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        if given:
            raise click.UsageError(f"options go after the sub-command: flashkda-build {ctx.invoked_subcommand} --...")
        return
    architectures = parse_architectures(archs)
    if release and architectures != ARCHITECTURES:
        raise click.UsageError("--release takes every architecture; leave --arch out")
    if archs:
        click.echo(
            "architectures: " + ", ".join(f"{a.name} ({', '.join(a.products)})" for a in architectures), err=True
        )
    with _progress(len(architectures) * len(load_kernels(project.kernels))) as progress:
        manifest, compiled = build(
            output, architectures, package=project.kernels, jobs=jobs, force=force, progress=progress
        )
    released = _released() if release else None
    if released:
        released.parent.mkdir(exist_ok=True)
        shutil.copyfile(output / MANIFEST, released)
    if as_json:
        _dump(
            {"output": str(output), "compiled": compiled, "released": released and str(released), "manifest": manifest}
        )
    else:
        size = sum(artifact["size"] for artifact in manifest["artifacts"])
        click.echo(f"{output}: {len(manifest['artifacts'])} cubins, {size} bytes{'' if compiled else ', up to date'}")
        if released:
            click.echo(f"{released}: written")


def _released() -> Path:
    return Path("manifests", f"{__version__}.json")


@main.command("list")
@_arch
@_json
@click.pass_obj
def list_(project: Project, archs: tuple[str, ...], as_json: bool) -> None:
    """List what a build makes: each variant on each architecture."""
    rows = [(spec, arch) for arch in parse_architectures(archs) for spec in load_kernels(project.kernels)]
    if as_json:
        _dump([{**asdict(spec), "arch": arch.name, "file": spec.file_name(arch.name)} for spec, arch in rows])
    else:
        _table(
            ("file", "threads", "shared memory", "runs on", "products"),
            [
                (
                    s.file_name(a.name),
                    s.threads,
                    s.dynamic_shared_memory,
                    ", ".join(a.compute_capabilities),
                    ", ".join(a.products),
                )
                for s, a in rows
            ],
        )


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@_json
@click.pass_context
def inspect(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Show what is in PATH: a cubin, a manifest, or a folder with one (exit code 1 if its files differ from it)."""
    if path.suffix == ".cubin":
        cubin = asdict(read_cubin(path.read_bytes()))
        if as_json:
            _dump(cubin)
        else:
            _table(("property", "value"), cubin.items())
        return
    file = path / MANIFEST if path.is_dir() else path
    manifest = read_manifest(file)
    damaged = damaged_files(file.parent, manifest) if path.is_dir() else []
    if as_json:
        _dump({"manifest": manifest, "damaged": damaged})
    else:
        tool = manifest["toolchain"]
        click.echo(f"flashkda {manifest['package_version']}, sources {manifest['source_digest']}")
        dsl = f"{tool['dsl']} {tool['dsl_version']} ({tool['flavour']})"
        common = [option for option in tool["options"] if ": " not in option]
        options = "; ".join([" ".join(common), *(option for option in tool["options"] if option not in common)])
        click.echo(f"{dsl}, ptxas {tool['ptxas_version']}, {options}")
        _table(
            ("file", "runs on", "bytes", "registers", "threads", "shared memory", "least driver", "sha256"),
            [
                (
                    a["file"], ", ".join(a["compute_capabilities"]), a["size"], a["registers"], a["threads"],
                    a["static_shared_memory"] + a["dynamic_shared_memory"],
                    f"{a['least_driver'] // 1000}.{a['least_driver'] % 1000 // 10}",
                    "MISSING OR CHANGED" if a["file"] in damaged else a["sha256"],
                )
                for a in manifest["artifacts"]
            ],
        )  # fmt: skip
    if damaged:
        ctx.exit(1)


@main.command()
@click.option(
    "--manifest",
    "reference",
    type=click.Path(path_type=Path),
    help="What to compare with. [default: manifests/VERSION.json]",
)
@_jobs
@_json
@click.pass_context
def check(ctx: click.Context, reference: Path | None, jobs: int, as_json: bool) -> None:
    """Build everything anew in a temporary folder and compare with the released manifest, byte for byte.

    Run it in the root of a checkout.
    """
    project = ctx.ensure_object(Project)
    reference = reference or _released()
    released = read_manifest(
        reference, "run flashkda-build check in the root of a checkout, or name another manifest with --manifest"
    )
    total = len(ARCHITECTURES) * len(load_kernels(project.kernels))
    with tempfile.TemporaryDirectory(prefix="flashkda-check-") as folder, _progress(total) as progress:
        rebuilt = compile_into(Path(folder), ARCHITECTURES, package=project.kernels, jobs=jobs, progress=progress)
    found = differences(rebuilt, released)
    if as_json:
        _dump({"reference": str(reference), "equal": not found, "differences": found})
    elif found:
        click.echo("\n".join(f"rebuilt against {reference}: {line}" for line in found))
    else:
        click.echo(f"{len(rebuilt['artifacts'])} cubins equal to {reference}")
    if found:
        ctx.exit(1)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), default=_folder)
@_json
@click.pass_context
def audit(ctx: click.Context, folder: Path, as_json: bool) -> None:
    """Check the machine code of the cubins in FOLDER (default: artifacts) against the design."""
    project = ctx.ensure_object(Project)
    expectations = importlib.import_module(project.expectations).EXPECTATIONS
    variants = audit_folder(folder, load_kernels(project.kernels), expectations)
    findings = sum(len(variant.findings) for variant in variants)
    if as_json:
        _dump({"findings": findings, "variants": [asdict(variant) for variant in variants]})
    else:
        for variant in variants:
            _show(variant)
        click.echo(f"{findings} findings" if findings else "no findings")
    if findings:
        ctx.exit(1)


@main.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--arch", metavar="ARCH", required=True, help="The architecture to search for: h200, sm_90a, ...")
@click.option(
    "--count", type=click.IntRange(min=1), default=50, show_default=True, help="How many; the first is today's."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed, other candidates.")
def tune(output: Path, arch: str, count: int, seed: int) -> None:
    """Build COUNT variants of the recurrence's schedules into OUTPUT, to be timed with tests/gpu/compare_builds.py."""
    (architecture,) = parse_architectures((arch,))
    with _progress(count) as progress:
        folders = tune_schedules(output, architecture, count, seed, progress)
    click.echo(f"{output}: {len(folders)} builds for {architecture.name}")


def _show(variant: Variant) -> None:
    archs = list(variant.counts)
    rows = [(name, *(variant.counts[arch][name] for arch in archs)) for name in AUDITED]
    occupancy = ("CTAs an SM", *(variant.ctas_per_sm[arch] for arch in archs))
    _table((variant.label, *archs), [*(row for row in rows if any(row[1:])), occupancy])
    for finding in variant.findings:
        click.echo(f"  FINDING {finding}")
    click.echo()
