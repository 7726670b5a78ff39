"""A server's life in a process of its own, on made-up devices: import, `fwd` five times, `flashkda info`.

    python serve_once.py FOLDER

FOLDER: where artifacts are written; FLASHKDA_ARTIFACTS must name it. Prints what `info` prints, then a line of JSON:
the environment variables that flashkda's own modules asked for in each step. What other packages ask for is theirs.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNTIME = Path(__file__).parents[2] / "runtime"
PASSED_THROUGH = {"os", "_collections_abc", "collections.abc"}
asked: set[str] = set()


def note(key: str) -> None:
    """Keep a key if flashkda asks for it, itself or through os.getenv, get, in and the like."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in PASSED_THROUGH and frame.f_back is not None:
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).partition(".")[0] == "flashkda":
        asked.add(key)


class Recording(type(os.environ)):  # type: ignore[misc]
    """os.environ, which becomes one in place: whoever holds it already is seen too."""

    def __getitem__(self, key: Any) -> Any:
        note(os.fsdecode(key))
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        note("all of them")
        return super().__iter__()

    def copy(self) -> Any:
        note("all of them")
        return super().copy()


def answer() -> list[str]:
    """What was asked for since the last answer."""
    found = sorted(asked)
    asked.clear()
    return found


def main() -> None:
    os.environ.__class__ = os.environb.__class__ = Recording
    sys.path.insert(0, str(RUNTIME))
    steps = {}

    import flashkda

    for module in sorted(file.stem for file in Path(flashkda.__file__).parent.glob("[a-z]*.py")):
        importlib.import_module(f"flashkda.{module}")
    steps["import"] = answer()

    specification = importlib.util.spec_from_file_location("fakes", Path(__file__).with_name("conftest.py"))
    assert specification is not None and specification.loader is not None
    fakes = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(fakes)
    import pytest
    import torch

    patches = pytest.MonkeyPatch()
    cuda, on_cuda = fakes.stand_in_driver(patches), fakes.stand_in_tensors(patches)
    fakes.write_folder(Path(sys.argv[1]), fakes.make_manifest())
    answer()

    q, k, v, g, out = (on_cuda(torch.zeros(1, 40, 2, 128, dtype=torch.bfloat16)) for _ in range(5))
    beta = on_cuda(torch.zeros(1, 40, 2, dtype=torch.bfloat16))
    a_log, dt_bias = on_cuda(torch.zeros(2)), on_cuda(torch.zeros(2, 128))
    for _ in range(5):
        flashkda.fwd(q, k, v, g, beta, 128**-0.5, out, a_log, dt_bias, -5.0)
    flashkda.preload(1)
    assert len(cuda.launches) == 10 and len(cuda.loaded) == 8
    steps["fwd"] = answer()

    from flashkda.cli import main as command

    with contextlib.suppress(SystemExit):
        command(["info"])
    steps["info"] = answer()
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
