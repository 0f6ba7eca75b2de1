"""`minidist lessons`: the table of progress, and JupyterLab in the folder, which ends with Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidist.cli import lessons as folder_of
from tests.conftest import Run
from tests.helpers.clocks import HANG

LESSON = """# %% [markdown]
# # 3. Small things
#
# **Time:** about 1.5 hours. **Builds on:** nothing.
# %% tags=["exercise"]
def first(x): ...
# %%
first = or_solution(first)
# %%
second = or_solution(second)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one lesson, one of whose two exercises has passed."""
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "figures.py").touch()
    (tmp_path / "03_small_things.py").write_text(LESSON)
    (tmp_path / "costs.json").write_text('{"03_small_things": {"seconds": 90, "peak_megabytes": 400}}')
    progress = {"version": 1, "passed": {"small_things": {"first": "2026-01-01", "gone": "2026-01-01"}}}
    progress["at_par"] = {"small_things": {"first": "2026-01-01"}}
    (tmp_path / ".progress.json").write_text(json.dumps(progress))
    monkeypatch.delenv("MINIDIST_LESSONS_PROGRESS", raising=False)
    monkeypatch.setattr(folder_of, "folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_table_shows_what_has_passed(run: Run) -> None:
    code, out, err = run("lessons", "--progress")
    assert (code, out, err) == run("lessons")  # a pipe: JupyterLab stays closed
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if "Small things" in line]
    assert line.split() == ["03", "Small", "things", "1", "of", "2", "1", "1.5", "h", "1.5", "min"]


def test_passed_is_not_at_par(folder: Path) -> None:
    """Also in a file from before par was kept."""
    passed = {"small_things": {"first": "2026-01-01"}}
    for kept in ({"passed": passed, "at_par": {}}, {"passed": passed}):
        (folder / ".progress.json").write_text(json.dumps(kept))
        (lesson,) = folder_of.read_lessons(folder)
        assert (lesson.passed, lesson.at_par) == (("first",), ())


def test_the_hours_of_the_lessons_are_read() -> None:
    at = folder_of.folder()
    found = {each.number: each.hours for each in folder_of.read_lessons(at)}
    says = {int(each.name[:2]): "**Time:**" in each.read_text() for each in at.glob("[01][0-9]_*.py")}
    assert {number: hours is not None for number, hours in found.items()} == says
    assert (found[1], found[4]) == (1.5, 2)


def test_json_has_the_same(run: Run, folder: Path) -> None:
    code, out, _ = run("lessons", "--json")
    (lesson,) = json.loads(out)["lessons"]
    assert code == 0
    assert lesson == {
        "number": 3,
        "title": "Small things",
        "exercises": ["first", "second"],
        "passed": ["first"],
        "at_par": ["first"],
        "hours": 1.5,
        "seconds": 90,
    }


def test_without_progress_or_with_a_damaged_file_nothing_has_passed(folder: Path) -> None:
    (folder / ".progress.json").write_text("{")
    assert folder_of.read_lessons(folder)[0].passed == ()
    (folder / ".progress.json").unlink()
    assert folder_of.read_lessons(folder)[0].passed == ()


@pytest.mark.usefixtures("folder")
def test_where_jupyterlab_is_missing_it_says_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_of.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, _, err = run("lessons")
    assert (code, err) == (
        2,
        "minidist: minidist lessons needs jupyterlab: pip install 'minidist[lessons]'\n",
    )


def test_where_the_folder_is_missing_it_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder_of, "__file__", str(tmp_path / "minidist" / "lessons.py"))
    with pytest.raises(ValueError, match=r"there are no lessons in .*; minidist lessons --to FOLDER"):
        folder_of.folder()


def test_ctrl_c_ends_jupyterlab(tmp_path: Path) -> None:
    """A server stands in for JupyterLab: as with -y, it ends some time after Ctrl-C."""
    stand_in = tmp_path / "jupyterlab"
    stand_in.mkdir()
    (stand_in / "__init__.py").touch()
    (stand_in / "__main__.py").write_text(
        "import os, sys, time\n"
        "try:\n"
        "    print('serves', os.path.basename(os.getcwd()), sys.argv[1:], flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.3)\n    print('saved', flush=True)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    terminal, end = pty.openpty()  # in a pipe it shows the table alone
    running = subprocess.Popen(
        [sys.executable, "-m", "minidist", "lessons"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(end)
    shown = os.fdopen(terminal)
    try:
        while "serves" not in (line := shown.readline()):
            assert line, "it ended"
        root = ["--allow-root"] if os.geteuid() == 0 else []  # without it JupyterLab refuses to start
        assert line == f"serves lessons {['-y', *root]}\n"
        time.sleep(0.2)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, err = running.communicate(timeout=HANG)
        out = shown.readline()
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        shown.close()
    assert (out, err, running.returncode) == ("saved\n", "minidist: stopped\n", 130)


def test_a_copy_leaves_files_that_are_there_and_another_readers_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    for path in (shipped / "checks", shipped / "checks" / "__pycache__", mine):
        path.mkdir(parents=True)
    for name in (
        "03_a.py",
        "04_b.py",
        ".progress.json",
        "checks/figures.py",
        "checks/__pycache__/x.pyc",
    ):
        (shipped / name).write_text("shipped")
    (mine / "03_a.py").write_text("an answer")
    monkeypatch.setattr(folder_of, "shipped", lambda: shipped)
    assert folder_of.copy(mine) == mine
    found = {str(path.relative_to(mine)): path.read_text() for path in mine.rglob("*") if path.is_file()}
    assert found == {"03_a.py": "an answer", "04_b.py": "shipped", "checks/figures.py": "shipped"}


def test_a_copy_that_fails_leaves_no_part_of_a_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next copy would leave it as it is, as if it were an answer."""
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    shipped.mkdir()
    for name in ("03_a.py", "04_b.py"):
        (shipped / name).write_text("shipped")

    def full(source: str, target: str) -> None:
        Path(target).write_text("ship")
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(folder_of, "shipped", lambda: shipped)
    with monkeypatch.context() as patch:
        patch.setattr(folder_of.shutil, "copyfile", full)
        with pytest.raises(ValueError, match=r"No space left on device: '[^']*'; name another folder$"):
            folder_of.copy(mine)
    assert list(mine.iterdir()) == []
    folder_of.copy(mine)
    assert (mine / "03_a.py").read_text() == "shipped"


def test_a_copy_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is a file; name a folder"):
        folder_of.copy(tmp_path / "file")


def test_the_package_has_the_repositorys_lessons() -> None:
    assert folder_of.shipped() == Path(__file__).parents[2] / "lessons"
