"""The `flashkda` command."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from flashkda import __version__
from flashkda.bench_peers import PEERS


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashkda")
def main() -> None:
    """Look at this installation of flashkda, and try, test and measure it on this machine's GPU."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show package, system, artifacts, driver, devices, and which artifact each device gets or why none.

    Exits with 1 if the installed artifacts are not usable, and with 0 where they are but no driver or visible device
    can use them: the installation is sound. --json tells why each artifact was refused.
    """
    from flashkda.info import collect, lines

    report = collect()
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(lines(report)))
    sys.exit(0 if report["ok"] else 1)


@main.command()
@click.option("--device", default=0, show_default=True, help="Index among the visible CUDA devices.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def selftest(device: int, as_json: bool) -> None:
    """Run the shipped goldens on a GPU and compare bits; needs torch. Exits with 1 on any difference."""
    from flashkda.errors import FlashKDAError
    from flashkda.selftest import run

    try:
        code = run(device=device, json=as_json)
    except FlashKDAError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


@main.command()
@click.option("--quick", is_flag=True, help="Only T=8192 and two packed shapes, instead of seven lengths and four.")
@click.option("--heads", multiple=True, type=click.IntRange(min=1), help="These numbers of heads only; repeatable.")
@click.option(
    "--tokens", multiple=True, type=click.IntRange(min=1), help="One sequence of this length only; repeatable."
)
@click.option(
    "--samples", default=11, show_default=True, type=click.IntRange(min=11), help="Timed replays of each variant."
)
@click.option(
    "--peer", "named_peers", multiple=True, type=click.Choice(PEERS),
    help="Measure this one too, and no other; repeatable. By default flash_kda if it can be imported. fla compiles and "
    "tunes itself for a minute or more at every number of heads.",
)  # fmt: skip
@click.option("--no-peers", is_flag=True, help="Measure flashkda alone.")
@click.option("--cold-start", is_flag=True, help="Measure fresh processes up to their first result, and nothing else.")
@click.option(
    "--processes", default=10, show_default=True, type=click.IntRange(min=1),
    help="Fresh processes of each with --cold-start; fla has one.",
)  # fmt: skip
@click.option(
    "--at-once", default=8, show_default=True, type=click.IntRange(min=0),
    help="Fresh processes of flashkda with --cold-start that wait until all have a context, and are then released "
    "together; 0 for none.",
)  # fmt: skip
@click.option("--device", default=0, show_default=True, help="Index among the visible CUDA devices.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report here, after each shape or process anew: what is measured is kept if the run is stopped.",
)  # fmt: skip
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw figures; needs matplotlib."
)
@click.option(
    "--from", "from_files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show this report instead of measuring; repeatable. --plot draws each figure from the first that can fill it. "
    "No other option goes with it.",
)  # fmt: skip
@click.pass_context
def bench(
    ctx: click.Context,
    quick: bool,
    heads: tuple[int, ...],
    tokens: tuple[int, ...],
    samples: int,
    named_peers: tuple[str, ...],
    no_peers: bool,
    cold_start: bool,
    processes: int,
    at_once: int,
    device: int,
    json_file: Path | None,
    plot_file: Path | None,
    from_files: tuple[Path, ...],
) -> None:
    """Measure prepare, recurrence and both on a GPU, at every BV, beside the chain's floor and other implementations.

    Needs torch. Exits with 1 if results differ in bits from the original's, or between BVs, or a named peer is absent.
    """
    from flashkda.bench import load_report, measure, measure_cold_start, same_bits_everywhere, write_report
    from flashkda.bench_plot import draw, require_matplotlib
    from flashkda.bench_report import lines
    from flashkda.bench_shapes import select
    from flashkda.errors import FlashKDAError

    def tell(line: str) -> None:
        click.echo(line, err=True)

    def keep(report: dict[str, Any]) -> None:
        if json_file is not None:
            write_report(report, json_file)

    if named_peers and no_peers:
        raise click.UsageError("--peer and --no-peers exclude one another")
    if from_files:
        measuring = [
            option.opts[0]
            for option in ctx.command.params
            if option.name not in ("from_files", "plot_file")
            and ctx.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        ]
        if measuring:
            raise click.UsageError(f"--from shows a report as it is: {', '.join(measuring)} would change nothing")
    peers = tuple(dict.fromkeys(named_peers)) or (() if no_peers else None)
    try:
        if plot_file is not None:
            require_matplotlib()
        if from_files:
            reports = [load_report(file) for file in from_files]
        elif cold_start:
            reports = [measure_cold_start(device, processes, at_once, peers, tell, keep)]
        else:
            reports = [measure(device, select(tokens, heads, quick), samples, peers, tell, keep)]
        click.echo("\n\n".join("\n".join(lines(report)) for report in reports))
        if plot_file is not None:
            draw(reports, plot_file)
    except (FlashKDAError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not from_files:
            raise
        files = ", ".join(map(str, from_files))
        raise click.ClickException(
            f"{files}: no whole benchmark report ({error!r}); write one with flashkda bench --json"
        ) from error
    sys.exit(0 if all(map(same_bits_everywhere, reports)) else 1)


@main.command()
def alias() -> None:
    """Print the folder that makes `import flash_kda` find this package when it is on PYTHONPATH.

    Exits with 1 if another flash_kda is installed.
    """
    from flashkda.alias import FOLDER, refuse_another
    from flashkda.errors import AliasError

    try:
        refuse_another()
    except AliasError as error:
        raise click.ClickException(str(error)) from error
    click.echo(FOLDER)


@main.command()
@click.option("--tokens", default=5000, show_default=True, type=click.IntRange(min=1), help="Length of the prompt.")
@click.option("--piece", default=1024, show_default=True, type=click.IntRange(min=16), help="A multiple of 16 tokens.")
@click.option("--device", default=0, show_default=True, help="Index among the visible CUDA devices.")
def demo(tokens: int, piece: int, device: int) -> None:
    """A KDA layer's forward: a prompt in one call, and in pieces through a state pool; needs torch.

    Exits with 1 if any bit differs between the two. The code is written to be read: flashkda/demo.py.
    """
    from importlib.util import find_spec

    from flashkda.errors import FlashKDAError

    if find_spec("torch") is None:
        raise click.ClickException("the demo needs torch, which is not installed; pip install torch")
    from flashkda.demo import run

    if piece % 16:
        raise click.BadParameter("must be a multiple of 16", param_hint="--piece")
    try:
        code = run(device, tokens, piece)
    except FlashKDAError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)
