"""What README.md says is so: its commands and options exist, its example fits the API, its links and numbers hold."""

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

import flashkda
from flashkda.bench import load_report
from flashkda.bench_shapes import Shape
from flashkda.cli import main as flashkda_command
from flashkda.goldens.cases import CASES
from flashkda.resolver import cuda_version
from flashkda_build.architectures import ARCHITECTURES
from flashkda_build.cli import main as build_command
from flashkda_build.kernels import KERNELS
from flashkda_build.kernels.record import RECORD_BYTES
from flashkda_build.toolchain import DSL, DSL_VERSION, PTXAS_VERSION

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASUREMENTS = Path("build_kernels/measurements")
USUAL_TOKENS = 8192
COMMANDS = {"flashkda": flashkda_command, "flashkda-build": build_command}


def blocks(language: str) -> list[str]:
    """The contents of the fenced blocks in a language."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", README, re.DOTALL | re.MULTILINE)
    return [text for _, text in found]


def table(*head: str) -> list[list[str]]:
    """The rows of the table with these first heads, as cells."""
    start = README.index(f"| {' | '.join(head)} |")
    lines = README[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def command_lines() -> list[str]:
    """Every call of one of our commands, in blocks and in running text, without the folder it lies in."""
    prose = re.sub(r"^ *```.*?^ *```$", "", README, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"`([^`\n]+)`", prose)
    for block in blocks("sh"):
        lines += [part.strip() for line in block.splitlines() for part in line.split("&&")]
    calls = [re.sub(r"^\S*/(?=flashkda)", "", line) for line in lines]
    return sorted({call for call in calls if re.match(r"flashkda(-build)?( |$)", call)})


def refusal(line: str) -> str | None:
    """Why a command line is not one of ours; None if it is."""
    name, *words = shlex.split(line)
    command: click.Command = COMMANDS[name]
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            option = next((one for one in command.params if word in (*one.opts, *one.secondary_opts)), None)
            if not isinstance(option, click.Option):
                return f"{command.name} has no option {word}"
            if not option.is_flag:
                if not words:
                    return f"{word} takes a value"
                words.pop(0)
        elif isinstance(command, click.Group):
            if word not in command.commands:
                return f"{command.name} has no sub-command {word}"
            command = command.commands[word]
        elif not any(isinstance(one, click.Argument) for one in command.params):
            return f"{command.name} takes no argument, so no {word}"
    return None


def test_commands_are_found_in_blocks_and_in_text() -> None:
    assert {"flashkda-build", "flashkda-build inspect artifacts", "flashkda info", "flashkda selftest"} <= set(
        command_lines()
    )
    assert any("--plot" in line for line in command_lines())


@pytest.mark.parametrize("line", command_lines())
def test_a_command_exists_with_its_options(line: str) -> None:
    assert refusal(line) is None


@pytest.mark.parametrize(
    "line", ["flashkda infos", "flashkda info --plot x", "flashkda-build --arch", "flashkda info x"]
)
def test_a_command_that_does_not_exist_would_be_noticed(line: str) -> None:
    assert refusal(line)


def test_installed_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    existing = set(re.findall(r"^(\w+) =", section, re.MULTILINE))
    used = {extra for extras in re.findall(r"pip install [^\n]*\[([\w,]+)\]", README) for extra in extras.split(",")}
    assert used and used <= existing


def test_the_wheels_name_carries_this_version() -> None:
    assert set(re.findall(r"flashkda-([\d.]+)-py3-none-any\.whl", README)) == {flashkda.__version__}


def test_the_example_fits_the_signatures() -> None:
    (example,) = blocks("python")
    called = set()
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("flashkda."):
            name = ast.unparse(node.func).removeprefix("flashkda.")
            called.add(name)
            named = {str(keyword.arg): keyword.value for keyword in node.keywords}
            bound = inspect.signature(getattr(flashkda, name)).bind(*node.args, **named)
            for parameter, value in bound.arguments.items():
                # A variable that is named after another parameter is one in the wrong place.
                if isinstance(value, ast.Name) and value.id in inspect.signature(flashkda.fwd).parameters:
                    assert value.id == parameter
    functions = {name for name in flashkda.__all__ if inspect.isfunction(getattr(flashkda, name))}
    assert called == functions


@pytest.mark.gpu
def test_the_example_runs() -> None:
    pytest.importorskip("torch")
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})


def test_the_argument_table_is_fwds_signature() -> None:
    rows = table("argument", "dtype", "shape")
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(inspect.signature(flashkda.fwd).parameters)


def test_the_error_table_has_every_public_error() -> None:
    errors = {name for name in flashkda.__all__ if name.endswith("Error")}
    assert {row[0].strip("`") for row in table("error", "cause")} == errors - {"FlashKDAError"}
    assert "`FlashKDAError`" in README


def test_the_table_of_chips_is_that_of_the_build() -> None:
    rows = table("compile target", "compute capability")
    said = [(row[0].strip("`"), row[1], row[2].lower(), row[3]) for row in rows]
    assert said == [
        (one.name, ", ".join(one.compute_capabilities), ", ".join(one.products), cuda_version(one.least_driver))
        for one in ARCHITECTURES
    ]


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README)
    missing = [target for target in targets if not target.startswith("https://") and not (ROOT / target).exists()]
    assert targets and missing == []


def test_constants_are_those_that_the_manifest_is_made_of() -> None:
    assert {int(size) for size in re.findall(r"\b(\d{5}) bytes", README)} == {RECORD_BYTES}
    bvs = sorted(spec.bv for spec in KERNELS if spec.bv is not None)
    (listed,) = re.findall(r"\| ([\d, or]+) value columns a CTA", README)
    assert [int(number) for number in re.findall(r"\d+", listed)] == bvs
    assert f"`{DSL}` {DSL_VERSION} with ptxas {PTXAS_VERSION}" in README


def test_the_wheels_bound_is_the_one_that_ci_enforces() -> None:
    (megabytes,) = re.findall(r"wheel under (\d+) MB", README)
    assert f"-lt {megabytes}000000 ]" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_counts_of_tests_are_those_of_the_tests() -> None:
    assert {int(count) for count in re.findall(r"(\d+) goldens", README)} == {len(CASES)}
    source = (ROOT / "tests/gpu/test_against_oracle.py").read_text(encoding="utf-8")
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    model_shapes = eval(ast.unparse(assigned["MODEL_SHAPES"]), {})
    random_shapes = ast.literal_eval(assigned["RANDOM_SHAPES"])
    assert f"{random_shapes} random shapes and {len(model_shapes)} model shapes" in README


# --- Numbers: the README's are those of the measured reports ---------------------------------------


def numbers(report: dict[str, Any], plot: Path) -> str:
    """A report as the README shows it: what ran where, its figure, and the automatic choice on the usual shapes."""
    header = report["header"]
    text = [
        f"{header['device']}, driver {header['driver_release']}, SM clock {header['clock_mhz']:.0f} MHz, "
        f"flashkda {header['flashkda']}" + (f", commit {header['commit']}" if header["commit"] else "") + ". "
        "Medians in us; floor: the chain of dependent instructions; speed-up: over `flash_kda`, both kernels.",
        "",
        f"![speed-up by heads, time by tokens, time by BV]({plot.as_posix()})",
        "",
        "| T | heads | BV | prepare | recurrence | both | `flash_kda` | speed-up | floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    shown: dict[tuple[str, int], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["bv"] is None and (len(row["lengths"]) > 1 or row["tokens"] == USUAL_TOKENS):
            shown.setdefault((row["shape"], row["heads"]), {})[row["by"], row["kernel"]] = row
    for (shape, heads), rows in shown.items():
        both = rows["flashkda", "both"]
        keys = (*(("flashkda", kernel) for kernel in ("prepare", "recurrence", "both")), ("flash_kda", "both"))
        times = [f"{rows[key]['us']['median']:.0f}" if key in rows else "" for key in keys]
        faster = "" if both["speed_up"] is None else f"{both['speed_up']:.2f}"
        cells = [shape, str(heads), str(both["bv_used"]), *times, faster, f"{both['chain_floor_us']:.0f}"]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def make_row(by: str, kernel: str, us: float, **changes: Any) -> dict[str, Any]:
    row = {
        "shape": "8192", "lengths": [8192], "tokens": 8192, "heads": 24, "by": by, "kernel": kernel, "bv": None,
        "bv_used": 32, "us": {"median": us}, "chain_floor_us": 92.6, "speed_up": None,
    }  # fmt: skip
    return row | changes


def test_numbers_are_the_automatic_choice_on_the_usual_shapes() -> None:
    header = {
        "device": "Made-up GPU", "driver_release": "580.1", "clock_mhz": 1980.0, "flashkda": "0.1.0", "commit": "0123ab"
    }  # fmt: skip
    packed = Shape((1024,) * 8, 6)
    rows = [
        make_row("flashkda", "prepare", 88.2),
        make_row("flashkda", "recurrence", 225.4),
        make_row("flashkda", "recurrence", 999.0, bv=64),
        make_row("flashkda", "both", 310.5, speed_up=3.0274),
        make_row("flash_kda", "both", 940.0, bv_used=None, speed_up=1.0),
        make_row("flashkda", "both", 77.0, tokens=4096, lengths=[4096], shape="4096"),
        make_row("flashkda", "both", 62.4, lengths=list(packed.lengths), shape=packed.label, heads=packed.heads),
    ]
    text = numbers({"header": header, "rows": rows}, Path("plots/one.png"))
    assert "Made-up GPU, driver 580.1, SM clock 1980 MHz, flashkda 0.1.0, commit 0123ab" in text
    assert "](plots/one.png)" in text
    assert text.splitlines()[-2:] == [
        "| 8192 | 24 | 32 | 88 | 225 | 310 | 940 | 3.03 | 93 |",
        "| 8x1024 | 6 | 32 |  |  | 62 |  |  | 93 |",
    ]


def test_the_numbers_are_those_measured() -> None:
    measured = []
    for file in sorted((ROOT / MEASUREMENTS).glob("*.json")):
        report = load_report(file)
        if report["rows"]:
            measured.append(numbers(report, MEASUREMENTS / f"{file.stem}.png"))
    wanted = "\n\n".join(measured) or "No measurement of this version is in the repository yet."
    found = README.split("<!-- numbers -->\n")[1].split("\n<!-- /numbers -->")[0]
    assert found == wanted, f"put this between the marks in README.md:\n\n{wanted}"
