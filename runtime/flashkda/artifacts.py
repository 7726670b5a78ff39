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

    def read(self, artifact: Artifact) -> bytes:
        """The bytes of a cubin. Raises `ArtifactError` unless they are the manifest's and agree with it."""
        data = _read_inside(self.path, artifact.file, artifact.size)
        if len(data) != artifact.size:
            found = f"more than {artifact.size}" if len(data) > artifact.size else str(len(data))
            raise ArtifactError(
                f"{artifact.file} in {self.path} has {found} bytes, but the manifest says {artifact.size}: "
                "the file was changed; reinstall the package"
            )
        digest = hashlib.sha256(data).hexdigest()
        if digest != artifact.sha256:
            raise ArtifactError(
                f"{artifact.file} in {self.path} has sha256 {digest}, but the manifest says {artifact.sha256}: "
                "the file was changed; reinstall the package"
            )
        check_cubin(artifact, data)
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
    if not path.is_dir():
        cause = f"{OVERRIDE} names it" if overridden else "the package was installed without its compiled kernels"
        raise ArtifactError(
            f"there is no artifacts folder {path} ({cause}); install a wheel, or build the kernels and let {OVERRIDE} "
            "name their folder"
        )
    manifest = parse(_read_inside(path, MANIFEST_NAME, _MANIFEST_LIMIT), str(path / MANIFEST_NAME))
    if manifest.package_version != __version__:
        raise ArtifactError(
            f"{path / MANIFEST_NAME} belongs to flashkda {manifest.package_version}, but this is {__version__}; "
            "rebuild or reinstall so that both agree"
        )
    return ArtifactFolder(path, overridden, manifest)


def _read_inside(folder: Path, name: str, limit: int) -> bytes:
    """Up to limit + 1 bytes of a regular file that really lies in `folder`; `name` has no folder in it."""
    file = folder / name
    try:
        found = os.lstat(file)
        if stat.S_ISLNK(found.st_mode):
            real = os.path.realpath(file)
            if os.path.dirname(real) != os.path.realpath(folder):
                raise ArtifactError(
                    f"{name} in {folder} is a link to {real}, outside the folder; reinstall the package"
                )
            found = os.stat(real)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError
        with open(file, "rb") as stream:
            return stream.read(limit + 1)
    except FileNotFoundError:
        raise ArtifactError(f"{name} is missing from {folder}; reinstall the package") from None
    except OSError as error:
        raise ArtifactError(f"{name} in {folder} cannot be read ({error}); check its permissions") from error
