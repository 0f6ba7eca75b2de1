"""The calibration command, without its measurements, which take minutes on an idle machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from minidist.parallel.contract.layout import Layout
from minidist.scale.planner import calibration
from minidist.scale.planner.calibration import BATCHES, LAYOUTS, Compared, calibrate, main, relative, table
from minidist.scale.planner.trial import NEAR


def test_layouts_are_of_their_numbers_of_ranks() -> None:
    for ranks, texts in LAYOUTS.items():
        assert [Layout.parse(text).ranks for text in texts] == [ranks] * len(texts)


def test_the_command_says_how_many_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Compared("byte-tiny", 2, "dp=2", 0.012, 0.010, {"compute": 0.012})]
    monkeypatch.setattr(calibration, "calibrate", lambda *_: found)
    assert main(["--ranks", "2"]) == 0
    assert "1 of 1 predictions are within 30%" in capsys.readouterr().out
    found.append(Compared("byte-tiny", 2, "tp=2", 0.012, 0.020, {"compute": 0.012}))
    assert main(["--ranks", "2"]) == 1
    assert "1 of 2 predictions" in capsys.readouterr().out
    found.append(Compared("byte-tiny", 4, "dp=4", 0.030, 0.010, {"compute": 0.012}))
    assert relative(found) == pytest.approx([1.2 / 0.9, 0.6 / 0.9, 1])
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(found))
    assert "0.60" in shown.get()
    assert main(["--ranks", "3"]) == 2
    assert "give some of 1, 2, 4, 8" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--figures"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("it is measured first"))
    for path, told in ((tmp_path, "is a folder"), (tmp_path / "none" / "file.json", "there is no folder")):
        assert main(["--ranks", "2", option, str(path)]) == 2
        said = capsys.readouterr().err
        assert f"{option} {path}" in said
        assert told in said
    measured = Compared("byte-tiny", 2, "dp=2", 0.010, 0.010, {})
    monkeypatch.setattr(calibration, "calibrate", lambda *_: [measured])
    assert main(["--ranks", "2", "--json", str(tmp_path / "file.json")]) == 0
    assert json.loads((tmp_path / "file.json").read_text())[0]["layout"] == "dp=2"


@pytest.mark.scale
@pytest.mark.parametrize("model", BATCHES)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_steps_take_as_long_as_predicted(ranks: int, model: str) -> None:
    found = calibrate([ranks], 15, [model])
    assert {each.layout: each.ratio for each in found if abs(each.ratio - 1) > NEAR} == {}
