import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashkda_build.cli import Project, main

TOYS = Project(kernels="toy_kernels", expectations="toy_expectations")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs flashkda-build in an empty folder; -> click's result."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, project=TOYS: CliRunner().invoke(main, arguments, obj=project)


@pytest.fixture
def built(toys, tmp_path):
    shutil.copytree(toys, tmp_path / "artifacts")
    return tmp_path / "artifacts"


def test_a_build_prints_one_line_a_variant_and_then_says_up_to_date(run, tmp_path):
    result = run("--arch", "h200")
    assert result.exit_code == 0, result.output
    assert "architectures: sm_90a (h100, h200, gh200)" in result.stderr
    assert "[1/2] prepare.flashkda.a.sm_90a.cubin" in result.stderr
    assert "[2/2] recurrence.flashkda.bv32.sm_90a.cubin" in result.stderr
    assert result.stdout.startswith("artifacts: 2 cubins")
    assert (tmp_path / "artifacts" / "manifest.json").exists()
    again = run("--arch", "sm_90")
    assert "up to date" in again.stdout
    assert "[1/2]" not in again.stderr


def test_the_json_report_is_all_there_is_on_stdout(run, built):
    report = json.loads(run("--json").stdout)
    assert report["compiled"] is False
    assert len(report["manifest"]["artifacts"]) == 6


def test_a_release_writes_the_manifest_that_check_then_accepts(run, built, tmp_path):
    result = run("--release")
    assert result.exit_code == 0, result.output
    (released,) = (tmp_path / "manifests").iterdir()
    assert released.read_bytes() == (built / "manifest.json").read_bytes()
    check = run("check", "--json")
    assert check.exit_code == 0, check.output
    assert json.loads(check.stdout) == {"reference": f"manifests/{released.name}", "equal": True, "differences": []}

    released.write_text(released.read_text().replace('"registers": ', '"registers": 1'))
    check = run("check")
    assert check.exit_code == 1
    assert "prepare.flashkda.a.sm_90a.cubin: registers" in check.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--arch", "sm_80"), 1, "architecture 'sm_80' is not one that can be built"),
        (("--jobs", "0"), 2, "0 is not in the range"),
        (("--release", "--arch", "h100"), 2, "leave --arch out"),
        (("--arch", "h100", "list"), 2, "options go after the sub-command"),
        (("audit",), 1, "there is no manifest artifacts/manifest.json"),
        (("check",), 1, ".json; run flashkda-build check in the root of a checkout"),
        (("inspect", "nothing"), 2, "does not exist"),
        (("unknown",), 2, "No such command"),
    ],
)
def test_bad_input_says_what_was_wrong_and_exits_non_zero(run, arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_kernel_that_does_not_compile_fails_the_build(run, tmp_path):
    result = run("--arch", "h100", project=Project(kernels="toy_broken"))
    assert result.exit_code == 1
    assert "recurrence.flashkda.bv32.sm_90a.cubin did not compile" in result.output
    assert list(tmp_path.iterdir()) == []


def test_list_names_every_file_a_build_makes(run, built):
    result = run("list", "--json")
    assert [row["file"] for row in json.loads(result.stdout)] == [
        a["file"] for a in json.loads((built / "manifest.json").read_text())["artifacts"]
    ]
    assert "prepare.flashkda.a.sm_103a.cubin" in run("list", "--arch", "b300").stdout


def test_inspect_shows_a_cubin_and_a_folder(run, built):
    cubin = run("inspect", "artifacts/prepare.flashkda.a.sm_90a.cubin", "--json")
    assert json.loads(cubin.stdout)["threads"] == 128
    folder = run("inspect", "artifacts")
    assert folder.exit_code == 0
    assert "recurrence.flashkda.bv32.sm_103a.cubin" in folder.stdout
    assert "ptxas 12.9.83, --opt-level 3\n" in folder.stdout


def test_inspect_keeps_a_kernels_own_options_apart(run, tmp_path, built):
    manifest = json.loads((built / "manifest.json").read_text())
    manifest["toolchain"]["options"] += ["prepare sm_90a: --a 1 --b", "recurrence sm_100a: --c"]
    (tmp_path / "one.json").write_text(json.dumps(manifest))
    shown = run("inspect", "one.json").stdout
    assert "--opt-level 3; prepare sm_90a: --a 1 --b; recurrence sm_100a: --c\n" in shown


@pytest.mark.parametrize("command", [(), ("list",), ("inspect",), ("check",), ("audit",), ("tune",)])
def test_help_has_a_short_name(run, command):
    short = run(*command, "-h")
    assert short.exit_code == 0 and short.output == run(*command, "--help").output


def test_inspect_reports_a_changed_cubin(run, built):
    with (built / "prepare.flashkda.a.sm_90a.cubin").open("ab") as file:
        file.write(b"x")
    result = run("inspect", "artifacts")
    assert result.exit_code == 1
    assert "MISSING OR CHANGED" in result.stdout


def test_audit_shows_the_architectures_side_by_side(run, built):
    result = run("audit")
    assert result.exit_code == 0, result.output
    head = result.stdout.splitlines()[0].split()
    assert head == ["prepare.flashkda.a", "sm_90a", "sm_100a", "sm_103a"]
    assert ["fp32", "mul", "1", "1", "1"] in [line.split() for line in result.stdout.splitlines()]
    assert result.stdout.endswith("no findings\n")


def test_audit_with_a_finding_exits_non_zero(run, built):
    for cubin in built.glob("*.cubin"):
        cubin.unlink()
    result = run("audit")
    assert result.exit_code == 1
    assert "FINDING sm_90a: prepare.flashkda.a.sm_90a.cubin is missing" in result.stdout
    assert result.stdout.endswith("6 findings\n")


def without(module, *arguments):
    """Runs flashkda-build as its script does, in a process where a module and what is in it cannot be imported."""
    root = Path(__file__).parents[2]
    program = (
        "import sys\n"
        "class Missing:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        f"sys.path[:0] = [{str(root / 'runtime')!r}, {str(root / 'build_kernels')!r}]\n"
        "sys.meta_path.insert(0, Missing)\n"
        f"sys.argv = ['flashkda-build', *{list(arguments)!r}]\n"
        "from flashkda_build.entry import main\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", [(), ("--help",), ("--version",), ("list",), ("check",), ("inspect", "artifacts")])
def test_without_the_extra_one_line_says_what_to_install(command):
    done = without("elftools", *command)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "pip install 'flashkda[build]'" in done.stderr


def test_another_missing_module_is_not_taken_for_the_extra():
    done = without("shutil", "list")
    assert done.returncode == 1 and "Traceback" in done.stderr and "flashkda[build]" not in done.stderr


def test_with_the_extra_the_script_runs_the_command():
    done = without("nothing", "list")
    assert done.returncode == 0 and "prepare.flashkda.a.sm_90a.cubin" in done.stdout
    assert without("nothing", "inspect", "nowhere").returncode == 2


def test_the_script_is_the_entry():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'flashkda-build = "flashkda_build.entry:main"' in project
