"""The folder of compiled kernels: where it is, its manifest, and files that must be the manifest's."""

import hashlib
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from flashkda import __version__
from flashkda.cubin import check_cubin
from flashkda.errors import ArtifactError
from flashkda.manifest import Artifact, Manifest, parse

OVERRIDE = "FLASHKDA_ARTIFACTS"
MANIFEST_NAME = "manifest.json"
_MANIFEST_LIMIT = 4 << 20


class ArtifactFolder(NamedTuple):
    """A folder with a manifest and the cubins it lists; `overridden` says that the environment named it."""

    path: Path
    overridden: bool
    manifest: Manifest

    @property
    def remedy(self) -> str:
        """What to do if something in the folder is not as it should be."""
        return _remedy(self.overridden)

    def read(self, artifact: Artifact) -> bytes:
        """The bytes of a cubin. Raises `ArtifactError` unless they are the manifest's and agree with it."""
        data = _read_inside(self.path, artifact.file, artifact.size, self.remedy)
        if len(data) != artifact.size:
            found = f"more than {artifact.size}" if len(data) > artifact.size else str(len(data))
            raise ArtifactError(
                f"{artifact.file} in {self.path} has {found} bytes, but the manifest says {artifact.size}: "
                f"the file was changed; {self.remedy}"
            )
        digest = hashlib.sha256(data).hexdigest()
        if digest != artifact.sha256:
            raise ArtifactError(
                f"{artifact.file} in {self.path} has sha256 {digest}, but the manifest says {artifact.sha256}: "
                f"the file was changed; {self.remedy}"
            )
        check_cubin(artifact, data, self.remedy)
        return data


def folder_path() -> tuple[Path, bool]:
    """The artifacts folder, and whether FLASHKDA_ARTIFACTS named it."""
    override = os.environ.get(OVERRIDE)
    if override:
        return Path(override), True
    return Path(__file__).parent / "artifacts", False


@lru_cache(maxsize=1)
def installed() -> ArtifactFolder:
    """The folder this process uses, decided at the first call. Raises `ArtifactError`."""
    return open_folder(*folder_path())


def open_folder(path: Path, overridden: bool) -> ArtifactFolder:
    """Read the manifest in `path`. Raises `ArtifactError` if it is missing, malformed or of another package version."""
    remedy = _remedy(overridden)
    if not path.is_dir():
        if overridden:
            raise ArtifactError(f"there is no artifacts folder {path} ({OVERRIDE} names it); {remedy}")
        raise ArtifactError(
            f"there is no artifacts folder {path} (the package was installed without its compiled kernels); install a "
            f"wheel, or build the kernels and let {OVERRIDE} name their folder"
        )
    manifest = parse(_read_inside(path, MANIFEST_NAME, _MANIFEST_LIMIT, remedy), str(path / MANIFEST_NAME), remedy)
    if manifest.package_version != __version__:
        raise ArtifactError(
            f"{path / MANIFEST_NAME} belongs to flashkda {manifest.package_version}, but this is {__version__}; "
            f"{remedy}"
        )
    return ArtifactFolder(path, overridden, manifest)


def _remedy(overridden: bool) -> str:
    """What makes a folder usable again; no installation changes the one that the environment names."""
    if overridden:
        return f"unset {OVERRIDE} or let it name a folder that flashkda-build made"
    return "reinstall the package"


def _read_inside(folder: Path, name: str, limit: int, remedy: str) -> bytes:
    """Up to limit + 1 bytes of a regular file that really lies in `folder`; `name` has no folder in it."""
    file = folder / name
    try:
        found = os.lstat(file)
        if stat.S_ISLNK(found.st_mode):
            real = os.path.realpath(file)
            if os.path.dirname(real) != os.path.realpath(folder):
                raise ArtifactError(f"{name} in {folder} is a link to {real}, outside the folder; {remedy}")
            found = os.stat(real)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError
        with open(file, "rb") as stream:
            return stream.read(limit + 1)
    except FileNotFoundError:
        raise ArtifactError(f"{name} is missing from {folder}; {remedy}") from None
    except OSError as error:
        raise ArtifactError(f"{name} in {folder} cannot be read ({error}); check its permissions") from error
