"""The wheel works alone: its files, its commands in another folder, and its version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import minidist
from tests.helpers.clocks import HANG
from tests.helpers.made_once import made_once

ROOT = Path(__file__).parent.parent
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("[0-9][0-9]_*.ipynb"))


def test_the_version_is_the_newest_of_the_changelog() -> None:
    versions = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == minidist.__version__


def test_the_workflow_runs_what_ci_runs() -> None:
    yaml = pytest.importorskip("yaml", reason="the workflow is YAML, and PyYAML is not installed")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["all"]["steps"] if "run" in step] == ["bash .ci/run"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of this tree, since a build leaves a folder that a later wheel would hold too."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77 builds the wheel; it is not installed here")

    def build(folder: Path) -> None:
        unbuilt = shutil.ignore_patterns(".venv", ".git", ".*_cache", "build", "*.egg-info", "__pycache__")
        source = Path(shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=unbuilt))
        command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
        command += ["-w", str(folder)]
        subprocess.run(command, cwd=source, check=True, timeout=HANG, capture_output=True)

    (found,) = made_once(tmp_path_factory, "wheel", build).glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel and nothing else: it stands before this tree on Python's path."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def run(installed: Path, at: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "minidist", *words]
    done = subprocess.run(command, cwd=at, env=environment, timeout=HANG, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.mark.deep
def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("git lists the files of the source tree, and this is no clone")
    source = [name for name in listed.stdout.split("\0") if name.endswith((".py", ".ipynb", ".css", ".js"))]
    inside = {
        "kernels": "minidist/kernels",
        "benchmarks": "minidist/benchmarks",
        "lessons": "minidist/lessons",
    }
    wanted = {
        "/".join([inside.get(top, top), rest])
        for top, _, rest in (name.partition("/") for name in source)
        if top in {"minidist", *inside}
    }
    assert wanted - names == set()
    assert {name.split("/")[0] for name in names} == {
        "minidist",
        f"minidist-{minidist.__version__}.dist-info",
    }
    assert not [name for name in names if "/.progress" in name or name.endswith(".pyc")]


@pytest.mark.deep
def test_it_says_its_version_and_licence(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["Version"] == minidist.__version__
    assert (said["License-Expression"], said["License-File"]) == ("MIT", "LICENSE")


@pytest.mark.deep
def test_its_lessons_are_copied_and_answers_stay(installed: Path, tmp_path: Path) -> None:
    assert "of " in run(installed, tmp_path, "lessons", "--to", "mine", "--progress")
    assert sorted(path.stem for path in (tmp_path / "mine").glob("*.ipynb")) == LESSONS
    (tmp_path / "mine" / "08_ranks_that_talk.ipynb").write_text("my answers")
    run(installed, tmp_path, "lessons", "--to", "mine", "--progress")
    assert (tmp_path / "mine" / "08_ranks_that_talk.ipynb").read_text() == "my answers"
    assert str(tmp_path / "mine") in run(installed, tmp_path / "mine", "lessons", "--json")


@pytest.mark.deep
def test_its_benchmarks_are_measured_in_any_folder(installed: Path, tmp_path: Path) -> None:
    run(installed, tmp_path, "bench", "lessons", "-k", "01_matmul")
    (kept,) = (tmp_path / "minidist-results").glob("*.json")
    assert "test_solution" in kept.read_text()
    run(installed, tmp_path, "report", "--out", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
