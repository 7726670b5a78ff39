import json
from itertools import islice

import pytest

from flashkda.artifacts import open_folder
from flashkda_build.architectures import parse_architecture
from flashkda_build.errors import BuildError
from flashkda_build.kernels.layout import SCHEDULES
from flashkda_build.tune import SCHEDULE, candidates, tune


def test_candidates_begin_with_the_schedules_in_use_and_differ_by_seed():
    first, *others = islice(candidates(1), 20)
    assert first == SCHEDULES
    assert len({str(schedules) for schedules in others}) == 19
    assert list(islice(candidates(1), 20)) == [first, *others]
    assert list(islice(candidates(2), 20))[1:] != others


def test_the_widest_keeps_its_launch_bound():
    assert {schedules[128].launch_bound for schedules in islice(candidates(3), 50)} == {SCHEDULES[128].launch_bound}


def test_candidates_are_whole_builds_of_which_the_first_is_todays(tmp_path):
    steps = []
    folders = tune(tmp_path / "found", parse_architecture("h200"), 2, 0, steps.append)
    assert [step.file for step in steps] == ["000", "001"]
    opened = [open_folder(folder, True) for folder in folders]
    cubins = [{a.file: one.read(a) for a in one.manifest.artifacts} for one in opened]
    assert len(cubins[0]) == 6
    differing = {file for file in cubins[0] if cubins[0][file] != cubins[1][file]}
    assert differing and not any(file.startswith("prepare") for file in differing)
    said = json.loads((folders[1] / SCHEDULE).read_text())
    assert said["32"]["early"] == list(islice(candidates(0), 2))[1][32].early


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "note").touch()
    with pytest.raises(BuildError, match="not empty"):
        tune(tmp_path / "found", parse_architecture("h200"), 1, 0, print)
