"""Only the manifest's own bytes are ever handed out."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkda.artifacts import ArtifactFolder, folder_path, installed, open_folder
from flashkda.cubin import check_cubin
from flashkda.errors import ArtifactError
from flashkda.manifest import Manifest

FILE = "prepare.flashkda.a.sm_90a.cubin"


@pytest.fixture
def folder(artifact_folder: Path) -> ArtifactFolder:
    return installed()


def read_error(folder: ArtifactFolder) -> str:
    with pytest.raises(ArtifactError) as caught:
        folder.read(folder.manifest.artifacts[0])
    assert FILE in str(caught.value)
    return str(caught.value)


def test_a_sound_file_is_read(folder: ArtifactFolder) -> None:
    assert folder.read(folder.manifest.artifacts[0]) == (folder.path / FILE).read_bytes()


@pytest.mark.parametrize("position", [0, 17, -1])
def test_a_flipped_bit_is_refused(folder: ArtifactFolder, position: int) -> None:
    data = bytearray((folder.path / FILE).read_bytes())
    data[position] ^= 1
    (folder.path / FILE).write_bytes(data)
    assert "sha256" in read_error(folder)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"\0"])
def test_a_wrong_length_is_refused(folder: ArtifactFolder, change: Callable[[bytes], bytes]) -> None:
    (folder.path / FILE).write_bytes(change((folder.path / FILE).read_bytes()))
    assert "bytes, but the manifest says" in read_error(folder)


def test_a_flipped_byte_anywhere_in_a_real_cubin_is_refused_by_name(tmp_path: Path) -> None:
    path, overridden = folder_path()
    if not path.is_dir():
        pytest.skip("the kernels are not built here")
    shutil.copytree(path, tmp_path / "artifacts")
    copied = open_folder(tmp_path / "artifacts", overridden)
    assert copied.manifest.artifacts
    for artifact in copied.manifest.artifacts:
        sound = copied.read(artifact)
        offsets = {step * (len(sound) - 1) // 63 for step in range(64)}
        assert len(offsets) == 64 and {0, len(sound) - 1} <= offsets
        with open(copied.path / artifact.file, "r+b", buffering=0) as file:
            for offset in offsets:
                file.seek(offset)
                file.write(bytes([sound[offset] ^ 0xFF]))
                with pytest.raises(ArtifactError, match="sha256") as caught:
                    copied.read(artifact)
                assert str(caught.value).startswith(f"{artifact.file} in "), (artifact.file, offset)
                file.seek(offset)
                file.write(sound[offset : offset + 1])
        assert copied.read(artifact) == sound


def test_another_listed_files_bytes_are_refused(folder: ArtifactFolder) -> None:
    (folder.path / FILE).write_bytes((folder.path / "prepare.flashkda.a.sm_100a.cubin").read_bytes())
    assert "was changed" in read_error(folder)


def test_a_missing_file_is_refused(folder: ArtifactFolder) -> None:
    (folder.path / FILE).unlink()
    assert "missing" in read_error(folder)


def test_a_folder_in_a_files_place_is_refused(folder: ArtifactFolder) -> None:
    (folder.path / FILE).unlink()
    (folder.path / FILE).mkdir()
    assert "missing" in read_error(folder)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_out_of_the_folder_is_refused_even_with_the_right_bytes(folder: ArtifactFolder, absolute: bool) -> None:
    outside = folder.path.parent / "elsewhere.cubin"
    os.rename(folder.path / FILE, outside)
    (folder.path / FILE).symlink_to(outside if absolute else "../elsewhere.cubin")
    assert "outside the folder" in read_error(folder)


def test_a_link_within_the_folder_is_fine(folder: ArtifactFolder) -> None:
    data = (folder.path / FILE).read_bytes()
    os.rename(folder.path / FILE, folder.path / "moved.cubin")
    (folder.path / FILE).symlink_to("moved.cubin")
    assert folder.read(folder.manifest.artifacts[0]) == data


def test_a_link_to_itself_is_refused(folder: ArtifactFolder) -> None:
    (folder.path / FILE).unlink()
    (folder.path / FILE).symlink_to(FILE)
    assert "cannot be read" in read_error(folder)


def test_a_link_to_nothing_is_refused(folder: ArtifactFolder) -> None:
    (folder.path / FILE).unlink()
    (folder.path / FILE).symlink_to("nothing.cubin")
    assert "missing" in read_error(folder)


def test_a_linked_folder_is_fine(folder: ArtifactFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.path)
    linked = open_folder(tmp_path / "link", True)
    assert linked.read(linked.manifest.artifacts[0])


def test_another_package_versions_manifest_is_refused(
    write_artifacts: Callable[[dict[str, Any]], Path], raw_manifest: dict[str, Any]
) -> None:
    raw_manifest["package_version"] = "0.0.9"
    with pytest.raises(ArtifactError, match=r"belongs to flashkda 0\.0\.9"):
        open_folder(write_artifacts(raw_manifest), True)


def test_a_missing_manifest_is_refused(artifact_folder: Path) -> None:
    (artifact_folder / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"manifest\.json is missing"):
        installed()


def test_a_missing_folder_named_by_the_environment_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHKDA_ARTIFACTS", str(tmp_path / "nowhere"))
    with pytest.raises(ArtifactError, match=r"FLASHKDA_ARTIFACTS names it.*; unset FLASHKDA_ARTIFACTS or let it name"):
        installed()


def test_without_the_environment_the_folder_is_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHKDA_ARTIFACTS", raising=False)
    path, overridden = folder_path()
    assert path.parts[-2:] == ("flashkda", "artifacts")
    assert not overridden


def another_version(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"package_version": "0.1.0"', '"package_version": "0.0.9"'))


def another_schema(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))


def another_entry(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"entry_prepare_a"', '"other"'))


def linked_elsewhere(folder: Path) -> None:
    os.rename(folder / FILE, folder.parent / "elsewhere.cubin")
    (folder / FILE).symlink_to("../elsewhere.cubin")


@pytest.mark.parametrize(
    "damage",
    [
        another_version, another_schema, another_entry, linked_elsewhere,
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / FILE).unlink(),
        lambda folder: (folder / FILE).write_bytes(b""),
        lambda folder: (folder / FILE).write_bytes(bytes((folder / FILE).stat().st_size)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("overridden", "remedy"),
    [
        (True, "; unset FLASHKDA_ARTIFACTS or let it name a folder that flashkda-build made"),
        (False, "; reinstall the package"),
    ],
)
def test_the_remedy_is_for_the_folder_that_is_used(
    artifact_folder: Path, damage: Callable[[Path], None], overridden: bool, remedy: str
) -> None:
    damage(artifact_folder)
    with pytest.raises(ArtifactError) as caught:
        folder = open_folder(artifact_folder, overridden)
        folder.read(folder.manifest.artifacts[0])
    assert str(caught.value).endswith(remedy)


# --- a manifest that lies about an unchanged file ------------------------------------------------


def lying(write_artifacts: Any, raw: dict[str, Any], index: int, change: Callable[[dict[str, Any]], None]) -> str:
    """What reading an artifact says when its manifest entry is changed, but for size and sha256, after the build."""
    folder = write_artifacts(raw)
    change(raw["artifacts"][index])
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError) as caught:
        opened = open_folder(folder, True)
        opened.read(opened.manifest.artifacts[index])
    assert raw["artifacts"][index]["file"] in str(caught.value)
    return str(caught.value)


def moved(artifact: dict[str, Any]) -> None:
    artifact["parameters"][-1]["offset"] += 4


def shortened(artifact: dict[str, Any]) -> None:
    artifact["parameters"].pop()


def lengthened(artifact: dict[str, Any]) -> None:
    end = artifact["parameters"][-1]["offset"] + 4
    artifact["parameters"].append({"name": "more", "type": "i32", "offset": end, "size": 4})


@pytest.mark.parametrize("change", [moved, shortened, lengthened])
@pytest.mark.parametrize("index", [0, 1])
def test_parameters_that_are_not_the_cubins_are_refused(
    write_artifacts: Any, raw_manifest: dict[str, Any], index: int, change: Callable[[dict[str, Any]], None]
) -> None:
    assert "takes parameters of (offset, size)" in lying(write_artifacts, raw_manifest, index, change)


@pytest.mark.parametrize(("index", "arch"), [(0, "sm_100a"), (6, "sm_103a"), (12, "sm_90a")])
def test_a_cubin_of_another_architecture_is_refused(
    write_artifacts: Any, raw_manifest: dict[str, Any], index: int, arch: str
) -> None:
    said = lying(write_artifacts, raw_manifest, index, lambda artifact: artifact.update(arch=arch))
    assert f"but the manifest says {arch}" in said


def test_a_kernel_that_is_not_in_the_cubin_is_refused(write_artifacts: Any, raw_manifest: dict[str, Any]) -> None:
    said = lying(write_artifacts, raw_manifest, 0, lambda artifact: artifact.update(entry="other"))
    assert "no such kernel" in said


def test_swapped_files_of_a_consistent_manifest_are_refused(write_artifacts: Any, raw_manifest: dict[str, Any]) -> None:
    first, second = raw_manifest["artifacts"][1], raw_manifest["artifacts"][7]

    def swap(artifact: dict[str, Any]) -> None:
        for name in ("file", "size", "sha256"):
            first[name], second[name] = second[name], first[name]

    assert "is compiled for sm_100" in lying(write_artifacts, raw_manifest, 1, swap)


@given(data=st.data())
def test_no_cubin_however_damaged_is_more_than_refused(
    manifest: Manifest, cubins: dict[str, bytes], data: st.DataObject
) -> None:
    """Were the manifest's digest that of the damaged file, what reads it would have to stand it."""
    artifact = data.draw(st.sampled_from(manifest.artifacts))
    cubin = bytearray(data.draw(st.sampled_from([cubins[artifact.file], b"", b"\x7fELF"])))
    for position in data.draw(st.lists(st.integers(0, max(0, len(cubin) - 1)), max_size=4)):
        cubin[position : position + 1] = data.draw(st.binary(max_size=9))
    try:
        check_cubin(artifact, bytes(cubin), "build it anew")
    except ArtifactError as error:
        assert artifact.file in str(error) and str(error).endswith("; build it anew")
