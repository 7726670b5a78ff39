"""What README.md says is so: its commands and options exist, its examples fit the API, its links and numbers hold.

Run as a program it writes what was measured between README.md's marks.
"""

import ast
import inspect
import json
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
from flashkda_build.kernels.record import CHUNK, RECORD_BYTES
from flashkda_build.toolchain import DSL, DSL_VERSION, PTXAS_VERSION

ROOT = Path(__file__).parents[1]
README_FILE = ROOT / "README.md"
README = README_FILE.read_text(encoding="utf-8")
MEASUREMENTS = Path("build_kernels/measurements")
USUAL_TOKENS = 8192
COMMANDS = {"flashkda": flashkda_command, "flashkda-build": build_command}
RELEASED = json.loads((ROOT / f"manifests/{flashkda.__version__}.json").read_text(encoding="utf-8"))["source_digest"]


def blocks(language: str, text: str = README) -> list[str]:
    """The contents of the fenced blocks in a language."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [content for _, content in found]


def section(heading: str) -> str:
    """What stands under a heading of level 2 or below, up to the next one of its level or above."""
    start = README.index(f"\n{heading}\n")
    level = len(heading.split()[0])
    # Of level 1 is the title alone, and every comment in a block of code.
    found = re.search(rf"^#{{2,{level}}} ", README[start + len(heading) + 2 :], re.MULTILINE)
    return README[start : start + len(heading) + 2 + found.start()] if found else README[start:]


def table(*head: str) -> list[list[str]]:
    """The rows of the table with these first heads, as cells."""
    start = README.index(f"| {' | '.join(head)} |")
    lines = README[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def shell_lines(text: str = README) -> list[str]:
    """What stands in blocks of shell commands, one command each, and all short code in running text, in their order."""
    found: list[str] = []
    for language, block, inline in re.findall(r"^ *```(\w*)\n(.*?)^ *```$|`([^`\n]+)`", text, re.DOTALL | re.MULTILINE):
        if inline:
            found.append(inline)
        elif language == "sh":
            lines = re.sub(r" *\\\n *", " ", block).splitlines()
            found += [part.strip() for line in lines for part in line.split("&&")]
    return [re.sub(r"^\w+=\$\((.*)\)$", r"\1", line) for line in found]


def command_lines() -> list[str]:
    """Every call of one of our commands, in blocks and in running text, without the folder it lies in."""
    calls = [re.sub(r"^\S*/(?=flashkda)", "", line) for line in shell_lines()]
    return sorted({call for call in calls if re.match(r"flashkda(-build)?( |$)", call)})


def missing_files(text: str = README) -> list[str]:
    """Files and folders that a command in the text names, that do not exist and that no command above it makes."""
    made: list[str] = []
    missing = []
    for line in shell_lines(text):
        if not re.match(r"(\S*/)?(flashkda|flashkda-build|pip|python3?|run|export)( |$)", line):
            continue  # Short code that is no command.
        before = ""
        for word in shlex.split(line):
            path = re.sub(r"^(\w+=)?(\$PWD/|\./)?|\[\w+\]$|/\*$", "", word)
            if before in ("--json", "--plot", "--output", "--wheel-dir", "venv", "tune"):
                made.append(path)
            elif re.search(r"/|\.(json|png|py|whl)$", path) and not path.startswith("-"):
                there = (ROOT / path).exists() or any(path == one or path.startswith(f"{one}/") for one in made)
                missing += [] if there else [path]
            before = word
        if " wheel " in line:
            made.append(f"flashkda-{flashkda.__version__}-py3-none-any.whl")
        if re.match(r"(\S*/)?flashkda-build( -|$)", line):
            made.append("artifacts")
    return missing


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


def test_files_in_commands_exist_or_are_made_by_a_command_above() -> None:
    assert missing_files() == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("```sh\nflashkda bench --json new.json\nflashkda bench --from new.json\n```\n", []),
        ("```sh\nflashkda bench --from new.json\nflashkda bench --json new.json\n```\n", ["new.json"]),
        ("```sh\nflashkda bench --from README.md \\\n    --from folder/new.json\n```\n", ["folder/new.json"]),
        ("Run `python -m pytest tests/gone` or `.ci/gone/run`.\n", ["tests/gone", ".ci/gone/run"]),
    ],
)
def test_a_file_that_is_not_there_would_be_noticed(text: str, missing: list[str]) -> None:
    assert missing_files(text) == missing


def test_installed_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    existing = set(re.findall(r"^(\w+) =", section, re.MULTILINE))
    used = {extra for extras in re.findall(r"pip install [^\n]*\[([\w,]+)\]", README) for extra in extras.split(",")}
    assert used and used <= existing


def test_the_wheels_name_carries_this_version() -> None:
    assert set(re.findall(r"flashkda-([\d.]+)-py3-none-any\.whl", README)) == {flashkda.__version__}


def test_the_examples_fit_the_signatures() -> None:
    called = set()
    for node in ast.walk(ast.parse("\n".join(blocks("python")))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("flashkda."):
            name = ast.unparse(node.func).removeprefix("flashkda.")
            called.add(name)
            named = {str(keyword.arg): keyword.value for keyword in node.keywords}
            positional: list[ast.expr] = []
            for value in node.args:
                # `*(x[...] for x in (q, k, v, g, beta))` are as many arguments as it names.
                starred = isinstance(value, ast.Starred) and isinstance(value.value, ast.GeneratorExp)
                positional += value.value.generators[0].iter.elts if starred else [value]  # type: ignore[attr-defined]
            bound = inspect.signature(getattr(flashkda, name)).bind(*positional, **named)
            for parameter, value in bound.arguments.items():
                # A variable that is named after another parameter is one in the wrong place.
                if isinstance(value, ast.Name) and value.id in inspect.signature(flashkda.fwd).parameters:
                    assert value.id == parameter
    functions = {name for name in flashkda.__all__ if inspect.isfunction(getattr(flashkda, name))}
    assert called == functions


@pytest.mark.gpu
def test_the_examples_of_the_api_run_one_after_another() -> None:
    pytest.importorskip("torch")
    namespace: dict[str, Any] = {}
    for example in blocks("python", section("## API")):
        exec(compile(example, "README.md", "exec"), namespace)


def function_source(file: str, name: str) -> str:
    """A function's text without its docstring."""
    source = (ROOT / file).read_text(encoding="utf-8")
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    lines = source.splitlines(keepends=True)
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines[first.lineno - 1 : first.end_lineno] = [""] * len(lines[first.lineno - 1 : first.end_lineno])
    return "".join(lines[function.lineno - 1 : function.end_lineno])


@pytest.mark.parametrize(("server", "function"), [("SGLang", "sglang_extend"), ("vLLM", "vllm_prefill")])
def test_a_servers_call_is_the_one_that_is_run(server: str, function: str) -> None:
    (example,) = blocks("python", section(f"### {server}"))
    assert example == function_source("tests/gpu/test_serving_calls.py", function)


def true_flags(source: str) -> set[str]:
    """Names that are given True, as keywords or in a dictionary."""
    keywords = re.findall(r"(\w+)=True\b", source)
    return {*keywords, *re.findall(r'"(\w+)": True\b', source)}


def test_the_call_of_flash_linear_attention_has_the_flags_of_the_one_that_is_run() -> None:
    (example,) = blocks("python", section("### flash-linear-attention"))
    source = function_source("tests/gpu/test_flash_linear_attention.py", "keywords")
    (pinned,) = re.findall(r"flash-linear-attention==([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert true_flags(example) - {"output_final_state"} == true_flags(source)
    assert f"Tested with {pinned};" in section("### flash-linear-attention")


def test_activated_inputs_come_back_from_the_conversion() -> None:
    torch = pytest.importorskip("torch")
    (conversion,) = blocks("python", section("## Which inputs"))
    generator = torch.Generator().manual_seed(1)
    beta = torch.rand(1, 64, 2, generator=generator).bfloat16()
    log_decay = -5 * torch.rand(1, 64, 2, 128, generator=generator)
    names = {"torch": torch, "beta": beta, "log_decay": log_decay, "lower_bound": -5.0, "H": 2}
    exec(compile(conversion, "README.md", "exec"), names)
    assert names["beta_logits"].dtype == names["g"].dtype == torch.bfloat16
    gate = -5 * torch.sigmoid(names["A_log"].exp()[:, None] * (names["g"].float() + names["dt_bias"]))
    assert torch.allclose(torch.sigmoid(names["beta_logits"].float()), beta.float(), rtol=0, atol=0.0008)
    assert torch.allclose(gate, log_decay, rtol=0, atol=0.0041)


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


def test_links_within_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    targets = set(re.findall(r"\]\(#([^)]+)\)", README))
    assert targets and targets <= anchors


def test_constants_are_those_that_the_manifest_is_made_of() -> None:
    assert {int(size) for size in re.findall(r"\b(\d{5}) bytes", README)} == {RECORD_BYTES}
    (per_token,) = re.findall(r"(\d+) bytes a token and head", README)
    assert int(per_token) * CHUNK == RECORD_BYTES
    bvs = sorted(spec.bv for spec in KERNELS if spec.bv is not None)
    tokens, chunk, heads, size, total = map(
        int, re.findall(r"\((\d+) / (\d+) \+ 1\) \* (\d+) \* (\d+) = (\d+)", README)[0]
    )
    assert (chunk, size) == (CHUNK, RECORD_BYTES) and total == flashkda.workspace_size(tokens, heads, 1)
    (listed,) = re.findall(r"\| ([\d, or]+) value columns a CTA", README)
    assert [int(number) for number in re.findall(r"\d+", listed)] == bvs
    assert f"`{DSL}` {DSL_VERSION} with ptxas {PTXAS_VERSION}" in README


def test_the_kernels_said_to_have_run_on_a_gpu_are_those_released() -> None:
    (digest,) = re.findall(r"source digest (\w+)", README)
    assert RELEASED.startswith(digest), "run tests/gpu with these kernels, and say so in README.md"


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


# --- What was measured: the README's is that of the reports in build_kernels/measurements -----------

#: Of a cold start, in the order in which they happen.
STEPS = ("import", "manifest", "driver", "load", "first call", "total", "second call")


def row_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table_of(*head: str) -> list[str]:
    return [row_of(list(head)), f"|{'---|' * len(head)}"]


def provenance(header: dict[str, Any]) -> str:
    commit = f", commit {header['commit']}" if header["commit"] else ""
    return f"{header['device']}, driver {header['driver_release']}, flashkda {header['flashkda']}{commit}"


def age(header: dict[str, Any]) -> list[str]:
    """A line for what was measured with other kernels than those released, else none."""
    digest = header["manifest_digest"]
    if digest == RELEASED:
        return []
    return [f"Measured with earlier kernels (manifest {digest[:8]}, now {RELEASED[:8]}): to be measured again."]


def numbers(report: dict[str, Any], plot: Path) -> str:
    """A report as "Numbers" shows it: what ran where, its figure, and the automatic choice on the usual shapes."""
    automatic = [row for row in report["rows"] if row["bv"] is None]
    plain = [row for row in automatic if not row.get("checkpoint_every")]
    original = any(row["by"] == "flash_kda" for row in plain)
    text = [
        f"{provenance(report['header'])}, SM clock {report['header']['clock_mhz']:.0f} MHz.",
        *age(report["header"]),
        "Medians in us. floor: the chain of dependent instructions. speed-up: over `flash_kda`, both kernels.",
    ]
    text += ["", f"![speed-ups by heads, times by tokens and by BV]({plot.as_posix()})", ""]
    text += table_of(
        "T", "heads", "BV", "prepare", "recurrence", "both", *(["`flash_kda`"] if original else []), "speed-up", "floor"
    )
    shown: dict[tuple[str, int], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in plain:
        if len(row["lengths"]) > 1 or row["tokens"] == USUAL_TOKENS:
            shown.setdefault((row["shape"], row["heads"]), {})[row["by"], row["kernel"]] = row
    for (shape, heads), rows in shown.items():
        both = rows["flashkda", "both"]
        keys = (
            *(("flashkda", kernel) for kernel in ("prepare", "recurrence", "both")),
            *([("flash_kda", "both")] if original else []),
        )
        times = [f"{rows[key]['us']['median']:.0f}" if key in rows else "" for key in keys]
        faster = "" if both["speed_up"] is None else f"{both['speed_up']:.2f}"
        text.append(row_of([shape, str(heads), str(both["bv_used"]), *times, faster, f"{both['chain_floor_us']:.0f}"]))
    stored = [row for row in automatic if row.get("checkpoint_every")]
    if stored:
        text += ["", "With checkpoints, both kernels:", ""]
        text += table_of("T", "heads", "tokens between checkpoints", "us", "us without", "cost")
    for row in stored:
        key = ("flashkda", "both", row["shape"], row["heads"])
        (without,) = (
            one["us"]["median"] for one in plain
            if (one["by"], one["kernel"], one["shape"], one["heads"]) == key
        )  # fmt: skip
        us = row["us"]["median"]
        cells = [row["shape"], str(row["heads"]), str(row["checkpoint_every"]), f"{us:.0f}", f"{without:.0f}"]
        text.append(row_of([*cells, f"{100 * (us / without - 1):.1f} %"]))
    return "\n".join(text)


def by_subject(report: dict[str, Any]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """By (shape, heads), and by whose: both kernels as one calls them."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["kernel"] == "both" and row["bv"] is None and not row.get("checkpoint_every"):
            found.setdefault((row["shape"], row["heads"]), {})[row["by"]] = row
    return found


def against_fla(report: dict[str, Any]) -> str:
    """What a report has beside flash-linear-attention; nothing if that took no part."""
    compared = {shape: rows for shape, rows in by_subject(report).items() if "fla" in rows}
    if not compared:
        return ""
    header = report["header"]
    text = [
        f"Against flash-linear-attention's Triton path (`fla` {header['peers']['fla']}), whose bits differ; medians in "
        "us of both kernels, in one process:", "",
        f"{provenance(header)}, torch {header['torch']}, SM clock {header['clock_mhz']:.0f} MHz.", *age(header), "",
        *table_of("T", "heads", "both", "`fla`", "ratio"),
    ]  # fmt: skip
    for (shape, heads), rows in compared.items():
        ours, theirs = (rows[by]["us"]["median"] for by in ("flashkda", "fla"))
        text.append(row_of([shape, str(heads), f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}"]))
    return "\n".join(text)


def is_against_fla_alone(report: dict[str, Any]) -> bool:
    """Whether a report was measured for `against_fla` and shows nothing else."""
    subjects = {row["by"] for row in report["rows"]}
    return "fla" in subjects and "flash_kda" not in subjects


def production(report: dict[str, Any]) -> str:
    """A report as "Running in production" shows it: cold starts stage by stage, and the host's time of a call."""
    header = report["header"]
    text = [f"{provenance(header)}, torch {header['torch']}, Python {header['python']}.", *age(header)]
    if report["cold_start"]:
        text += ["", "Milliseconds from a CUDA context to the first result in fresh processes, medians:", ""]
        text += table_of("", "processes", *STEPS)
    for row in report["cold_start"]:
        assert set(row["ms"]) <= set(STEPS), f"a step that is not in STEPS: {', '.join(row['ms'])}"
        times = [f"{row['ms'][step]['median']:.{1 if row['by'] == 'flashkda' else 0}f}" if step in row["ms"] else ""
                 for step in STEPS]  # fmt: skip
        at_once = f", {row['at_once']} at once" if row.get("at_once") else ""
        text.append(row_of([f"`{row['by']}`{at_once}", str(row["runs"]), *times]))
    if report["host"]:
        text += ["", f"Microseconds of the host for an eager call (T = {report['host'][0]['shape']}, "
                 f"{report['host'][0]['heads']} heads), both launches included:", ""]  # fmt: skip
        text += table_of("call", "median", "quartiles")
    for row in report["host"]:
        us = row["us"]
        quartiles = f"{us['lower_quartile']:.1f} to {us['upper_quartile']:.1f}"
        text.append(row_of([row["call"], f"{us['median']:.1f}", quartiles]))
    return "\n".join(text)


def measured(folder: Path) -> dict[str, str]:
    """By mark, what stands between it and its end in README.md. folder: of the reports."""
    # By stem: a GPU's first file is the one that the others add to.
    files = sorted(folder.glob("*.json"), key=lambda file: file.stem)
    reports = {file.stem: load_report(file) for file in files}
    usual = {stem: report for stem, report in reports.items() if not is_against_fla_alone(report)}
    found = {
        "numbers": [
            *(numbers(report, MEASUREMENTS / f"{stem}.png") for stem, report in usual.items() if report["rows"]),
            *filter(None, map(against_fla, reports.values())),
        ],
        "production": [production(report) for report in usual.values() if report["cold_start"] or report["host"]],
    }
    nothing = "No measurement of this version is in the repository yet."
    return {mark: "\n\n".join(texts) or nothing for mark, texts in found.items()}


def with_measured(readme: str) -> str:
    """README.md with what was measured in it."""
    for mark, text in measured(ROOT / MEASUREMENTS).items():
        before, rest = readme.split(f"<!-- {mark} -->\n")
        after = rest.split(f"<!-- /{mark} -->\n")[1]
        readme = f"{before}<!-- {mark} -->\n{text}\n<!-- /{mark} -->\n{after}"
    return readme


HEADER = {
    "device": "Made-up GPU", "driver_release": "580.1", "clock_mhz": 1980.0, "flashkda": "0.1.0", "commit": "0123ab",
    "torch": "2.99", "python": "3.13", "peers": {"flash_kda": "1ce47ea", "fla": "0.6.0"}, "manifest_digest": RELEASED,
}  # fmt: skip


def make_row(by: str, kernel: str, us: float, **changes: Any) -> dict[str, Any]:
    row = {
        "shape": "8192", "lengths": [8192], "tokens": 8192, "heads": 24, "by": by, "kernel": kernel, "bv": None,
        "bv_used": 32, "us": {"median": us}, "chain_floor_us": 92.6, "speed_up": None,
    }  # fmt: skip
    return row | changes


def test_numbers_are_the_automatic_choice_on_the_usual_shapes() -> None:
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
    text = numbers({"header": HEADER, "rows": rows}, Path("plots/one.png"))
    assert "Made-up GPU, driver 580.1, flashkda 0.1.0, commit 0123ab, SM clock 1980 MHz" in text
    assert "](plots/one.png)" in text
    assert text.splitlines()[-4:] == [
        "| T | heads | BV | prepare | recurrence | both | `flash_kda` | speed-up | floor |",
        "|---|---|---|---|---|---|---|---|---|",
        "| 8192 | 24 | 32 | 88 | 225 | 310 | 940 | 3.03 | 93 |",
        "| 8x1024 | 6 | 32 |  |  | 62 |  |  | 93 |",
    ]


def test_numbers_have_checkpoints_where_they_were_measured() -> None:
    rows = [
        make_row("flashkda", "both", 200.0, heads=12, checkpoint_every=None),
        make_row("flashkda", "both", 207.0, heads=12, checkpoint_every=64),
        make_row("flashkda", "both", 190.0, heads=6),
    ]
    lines = numbers({"header": HEADER, "rows": rows}, Path("one.png")).splitlines()
    assert "| T | heads | BV | prepare | recurrence | both | speed-up | floor |" in lines
    assert "| 8192 | 12 | 32 |  |  | 200 |  | 93 |" in lines
    assert "| 8192 | 6 | 32 |  |  | 190 |  | 93 |" in lines
    assert lines[-1] == "| 8192 | 12 | 64 | 207 | 200 | 3.5 % |"


def fla_rows() -> list[dict[str, Any]]:
    return [
        make_row("flashkda", "both", 300.0),
        make_row("flashkda", "both", 310.0, checkpoint_every=64),
        make_row("flashkda", "both", 290.0, bv=64),
        make_row("flashkda", "recurrence", 200.0),
        make_row("fla", "both", 1234.0, bv_used=None),
        make_row("flashkda", "both", 190.0, heads=6),
    ]


def test_flash_linear_attention_has_a_table_of_what_was_measured_beside_it() -> None:
    text = against_fla({"header": HEADER, "rows": fla_rows()})
    assert "`fla` 0.6.0" in text
    assert "Made-up GPU, driver 580.1, flashkda 0.1.0, commit 0123ab, torch 2.99, SM clock 1980 MHz." in text
    assert text.splitlines()[-3:] == [
        "| T | heads | both | `fla` | ratio |",
        "|---|---|---|---|---|",
        "| 8192 | 24 | 300 | 1234 | 4.11 |",
    ]
    assert against_fla({"header": HEADER, "rows": fla_rows()[:4]}) == ""


def write_measured(folder: Path, **reports: dict[str, Any]) -> dict[str, str]:
    """What README.md gets of these reports, by the stem of their files; a report's missing parts are empty."""
    for stem, report in reports.items():
        whole = {"report_version": 1, "header": HEADER, "rows": [], "host": [], "cold_start": []} | report
        (folder / f"{stem.replace('_', '-')}.json").write_text(json.dumps(whole))
    return measured(folder)


US = {"median": 20.0, "lower_quartile": 19.0, "upper_quartile": 21.0}
HOST = [{"call": "flashkda.fwd, workspace given", "shape": "256", "heads": 6, "us": US}]
COLD = [{"by": "flashkda", "runs": 10, "ms": {"total": US}}]


def test_three_files_say_what_one_file_with_all_of_it_does(tmp_path: Path) -> None:
    rows = [make_row("flashkda", "both", 310.5), make_row("flash_kda", "both", 940.0, bv_used=None)]
    (tmp_path / "apart").mkdir()
    apart = write_measured(
        tmp_path / "apart",
        gpu={"rows": rows, "host": HOST},
        gpu_fla={"rows": fla_rows(), "host": HOST},
        gpu_cold={"cold_start": COLD},
    )
    numbers_text, production_text = apart["numbers"], apart["production"]
    assert numbers_text.count(".png") == 1 and "measurements/gpu.png" in numbers_text
    assert numbers_text.index("| 8192 | 24 | 32 |") < numbers_text.index("Against flash-linear-attention")
    # The host's time was measured beside either peer, and is told once.
    assert production_text.count("workspace given") == production_text.count("| `flashkda` | 10 |") == 1
    (tmp_path / "one").mkdir()
    one = write_measured(tmp_path / "one", gpu={"rows": [*rows, fla_rows()[4]], "host": HOST, "cold_start": COLD})
    assert "`flash_kda`" in one["numbers"] and "| 8192 | 24 | 310 | 1234 | 3.97 |" in one["numbers"]
    assert set(production_text.splitlines()) == set(one["production"].splitlines())


def test_what_was_measured_with_other_kernels_than_those_released_says_so(tmp_path: Path) -> None:
    rows = [make_row("flashkda", "both", 310.5), make_row("flash_kda", "both", 940.0, bv_used=None), fla_rows()[4]]
    note = f"Measured with earlier kernels (manifest 01234567, now {RELEASED[:8]}): to be measured again."
    for digest, count in ((RELEASED, 0), ("0123456789ab", 1)):
        header = HEADER | {"manifest_digest": digest}
        texts = write_measured(tmp_path, gpu={"header": header, "rows": rows, "host": HOST})
        assert against_fla({"header": header, "rows": rows}).count(note) == count
        # Beside flash-linear-attention and in the table of its own.
        assert texts["numbers"].count(note) == count * 2 and texts["production"].count(note) == count


def test_without_reports_nothing_is_said_to_be_measured(tmp_path: Path) -> None:
    assert all("No measurement" in text for text in write_measured(tmp_path).values())


def test_production_figures_are_cold_starts_in_order_and_host_times() -> None:
    ours = {"second call": {"median": 0.08}, "first call": {"median": 13.47}, "import": {"median": 3.0}}
    cold = [
        {"by": "flashkda", "runs": 10, "ms": ours | {"total": {"median": 60.82}}},
        {"by": "fla", "runs": 1, "ms": {"first call": {"median": 81234.5}, "total": {"median": 83000.2}}},
    ]
    times = {"median": 18.27, "lower_quartile": 17.0, "upper_quartile": 19.55}
    host = [{"call": "flashkda.fwd, workspace given", "shape": "256", "heads": 6, "us": times}]
    text = production({"header": HEADER, "cold_start": cold, "host": host})
    assert "Made-up GPU, driver 580.1, flashkda 0.1.0, commit 0123ab, torch 2.99, Python 3.13." in text
    lines = text.splitlines()
    assert "|  | processes | import | manifest | driver | load | first call | total | second call |" in lines
    assert "| `flashkda` | 10 | 3.0 |  |  |  | 13.5 | 60.8 | 0.1 |" in lines
    assert "| `fla` | 1 |  |  |  |  | 81234 | 83000 |  |" in lines
    assert "Microseconds of the host for an eager call (T = 256, 6 heads), both launches included:" in lines
    assert lines[-1] == "| flashkda.fwd, workspace given | 18.3 | 17.0 to 19.6 |"
    at_once = {"by": "flashkda", "runs": 8, "at_once": 8, "ms": {"first call": {"median": 20.04}}}
    with_at_once = production({"header": HEADER, "cold_start": [cold[0], at_once, cold[1]], "host": host}).splitlines()
    assert [line for line in with_at_once if line not in lines] == [
        "| `flashkda`, 8 at once | 8 |  |  |  |  | 20.0 |  |  |"
    ]
    only_host = production({"header": HEADER, "cold_start": [], "host": host})
    assert "Milliseconds" not in only_host and only_host.splitlines()[-1] == lines[-1]


def test_the_figures_are_those_measured() -> None:
    assert with_measured(README) == README, "run: python tests/test_readme.py"


if __name__ == "__main__":
    README_FILE.write_text(with_measured(README), encoding="utf-8")
