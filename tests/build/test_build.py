import os
import re
import shutil
import sys
from dataclasses import replace

import pytest

import toy_kernels
from flashkda_build.architectures import ARCHITECTURES, parse_architectures
from flashkda_build.build import build
from flashkda_build.digest import source_digest
from flashkda_build.errors import BuildError
from flashkda_build.manifest import describe_artifact
from flashkda_build.spec import load_kernels
from flashkda_build.toolchain import require_ptxas

HOPPER = parse_architectures(("h100",))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bytes_do_not_depend_on_the_run_the_folder_or_the_environment(toys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    for name, value in {"CUTE_DSL_LINEINFO": "1", "CUTE_DSL_ARCH": "sm_80", "PYTHONHASHSEED": "7"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "some" / "other folder"
    build(folder, ARCHITECTURES, package="toy_kernels", jobs=1)
    assert contents(folder) == contents(toys)
    assert os.listdir(tmp_path) == ["some"]


def test_bytes_do_not_depend_on_where_the_sources_lie(toys, tmp_path, monkeypatch):
    moved = tmp_path / "moved"
    shutil.copytree(toy_kernels.__path__[0], moved / "toy_kernels")
    monkeypatch.syspath_prepend(str(moved))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("toys")])
    monkeypatch.delitem(sys.modules, "toy_kernels")
    build(tmp_path / "out", HOPPER, package="toy_kernels")
    file = "prepare.flashkda.a.sm_90a.cubin"
    assert (tmp_path / "out" / file).read_bytes() == (toys / file).read_bytes()


def test_an_up_to_date_folder_is_left_alone_unless_forced(toys, tmp_path):
    folder = tmp_path / "artifacts"
    shutil.copytree(toys, folder)
    steps = []
    _, compiled = build(folder, ARCHITECTURES, package="toy_kernels", progress=steps.append)
    assert not compiled
    assert not steps
    _, compiled = build(folder, HOPPER, package="toy_kernels", force=True, progress=steps.append)
    assert compiled
    assert [step.file for step in steps] == ["prepare.flashkda.a.sm_90a.cubin", "recurrence.flashkda.bv32.sm_90a.cubin"]
    assert sorted(contents(folder)) == ["manifest.json", *(step.file for step in steps)]


@pytest.mark.parametrize("damage", ["changed cubin", "missing cubin", "changed manifest", "missing manifest"])
def test_a_damaged_folder_is_built_again(toys, tmp_path, damage):
    folder = tmp_path / "artifacts"
    build(folder, HOPPER, package="toy_kernels")
    good = contents(folder)
    file = folder / ("manifest.json" if "manifest" in damage else "prepare.flashkda.a.sm_90a.cubin")
    if "missing" in damage:
        file.unlink()
    else:
        file.write_bytes(
            file.read_bytes().replace(b"kernel_cutlass", b"kernel_cutlasz").replace(b'"threads": 128', b'"threads": 64')
        )
    assert build(folder, HOPPER, package="toy_kernels")[1]
    assert contents(folder) == good


def test_a_failed_build_leaves_the_folder_as_it_was(toys, tmp_path):
    folder = tmp_path / "artifacts"
    shutil.copytree(toys, folder)
    with pytest.raises(BuildError, match=r"recurrence\.flashkda\.bv32\.sm_\d+a\.cubin did not compile(.|\n)*ptxas"):
        build(folder, ARCHITECTURES, package="toy_broken")
    assert contents(folder) == contents(toys)
    assert os.listdir(tmp_path) == ["artifacts"]


def test_a_failed_first_build_leaves_nothing(tmp_path):
    with pytest.raises(BuildError, match="did not compile"):
        build(tmp_path / "artifacts", HOPPER, package="toy_broken")
    assert os.listdir(tmp_path) == []


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(BuildError, match=r"thesis\.tex"):
        build(tmp_path, HOPPER, package="toy_kernels")
    with pytest.raises(BuildError, match="not a folder"):
        build(tmp_path / "thesis.tex", HOPPER, package="toy_kernels")
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_the_readme_in_the_folder_survives(tmp_path):
    folder = tmp_path / "artifacts"
    folder.mkdir()
    (folder / "README.md").write_text("kept")
    build(folder, HOPPER, package="toy_kernels")
    assert (folder / "README.md").read_text() == "kept"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 64}, "128 threads"),
        ({"parameters": toy_kernels.PARAMETERS[:-1]}, "parameters of"),
        ({"parameters": (*toy_kernels.PARAMETERS[:-1], ("factor", "i64"))}, "parameters of"),
    ],
)
def test_a_cubin_that_contradicts_the_variant_table_is_refused(toys, change, message):
    data = (toys / "prepare.flashkda.a.sm_90a.cubin").read_bytes()
    spec = replace(toy_kernels.KERNELS[0], **change)
    with pytest.raises(BuildError, match=message):
        describe_artifact(spec, ARCHITECTURES[0], data)
    with pytest.raises(BuildError, match="CUTE_DSL_ARCH=sm_100a"):
        describe_artifact(toy_kernels.KERNELS[0], ARCHITECTURES[1], data)


@pytest.mark.parametrize(("cuda", "ptxas"), [(134, "13.4.59"), (134, None), (129, "12.9.41")])
def test_another_assembler_than_the_pinned_one_is_refused(cuda, ptxas):
    require_ptxas("x", 129, None)
    require_ptxas("x", 129, "12.9.83")
    with pytest.raises(BuildError, match=r"the pin is 12\.9\.83"):
        require_ptxas("x", cuda, ptxas)


def test_a_parameter_of_unknown_type_is_refused():
    with pytest.raises(BuildError, match="factor: f64"):
        replace(toy_kernels.KERNELS[0], parameters=(("factor", "f64"),))


def test_a_record_order_of_no_operand_is_refused():
    with pytest.raises(BuildError, match=r"prepare\.flashkda\.c: record order 'c'"):
        replace(toy_kernels.KERNELS[0], record_order="c")


def test_two_rows_of_one_name_are_refused(monkeypatch):
    prepare, recurrence = toy_kernels.KERNELS
    other_prepare, other_recurrence = (replace(spec, record_order="b") for spec in toy_kernels.KERNELS)
    monkeypatch.setattr(toy_kernels, "KERNELS", (prepare, other_prepare, recurrence))
    assert [spec.label for spec in load_kernels("toy_kernels")][:2] == ["prepare.flashkda.a", "prepare.flashkda.b"]
    # The order of the records that it reads makes no other variant of a recurrence.
    for twice in (prepare, other_recurrence):
        monkeypatch.setattr(toy_kernels, "KERNELS", (prepare, recurrence, twice))
        with pytest.raises(BuildError, match=f"names {re.escape(twice.label)} twice"):
            load_kernels("toy_kernels")


def test_the_source_digest_follows_sources_variants_and_toolchain(tmp_path, monkeypatch):
    assert source_digest("toy_kernels") == source_digest("toy_kernels")
    before = source_digest("toy_kernels")
    with monkeypatch.context() as patch:
        patch.setattr(toy_kernels, "KERNELS", toy_kernels.KERNELS[:1])
        assert source_digest("toy_kernels") != before
    with monkeypatch.context() as patch:
        patch.setattr("flashkda_build.toolchain.OPTIONS", ("--opt-level", "2"))
        assert source_digest("toy_kernels") != before
    edited = tmp_path / "toy_kernels"
    shutil.copytree(toy_kernels.__path__[0], edited)
    with (edited / "scale.py").open("a") as file:
        file.write("# edited\n")
    with monkeypatch.context() as patch:
        patch.setattr(
            "importlib.util.find_spec", lambda name: type("Spec", (), {"submodule_search_locations": [str(edited)]})
        )
        assert source_digest("toy_kernels") != before
