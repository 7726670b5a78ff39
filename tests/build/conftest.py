"""Toy kernels, compiled once a session."""

from pathlib import Path

import pytest

from flashkda_build.architectures import ARCHITECTURES
from flashkda_build.build import build


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with toy_kernels for every architecture. Read only: copy it before changing it."""
    folder = tmp_path_factory.mktemp("toys") / "artifacts"
    build(folder, ARCHITECTURES, package="toy_kernels")
    return folder


@pytest.fixture(scope="session")
def offenders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with toy_offenders for every architecture. Read only."""
    folder = tmp_path_factory.mktemp("offenders") / "artifacts"
    build(folder, ARCHITECTURES, package="toy_offenders")
    return folder
