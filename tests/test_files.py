"""A file that cannot be written is told before the work that is to fill it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minidist._files import check_file


def test_a_file_that_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    check_file("--out", tmp_path / "new")
    check_file("--out", tmp_path / "there")
    check_file("--out", tmp_path / "a" / "b" / "new", make_folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "kept"
    check_file("--out", Path("/dev/null"))  # written in place, whatever its folder takes


def test_a_file_that_may_not_be_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for root it never is
    with pytest.raises(ValueError, match=r"--out .*there may not be written; name another file"):
        check_file("--out", tmp_path / "there")


@pytest.mark.parametrize("make_folder", [False, True])
def test_what_is_wrong_is_named_with_the_remedy(tmp_path: Path, make_folder: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--plot .* is a folder; give the name of a file"):
        check_file("--plot", tmp_path, make_folder)
    with pytest.raises(ValueError, match=r"file is a file; name a folder"):
        check_file("--out", tmp_path / "file" / "x.json", make_folder)
    with pytest.raises(ValueError, match=r"--out /proc/x.json: /proc takes no files \(.*\); name another"):
        check_file("--out", Path("/proc/x.json"), make_folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*none; make it, or name another"):
        check_file("--out", tmp_path / "none" / "x.json")
