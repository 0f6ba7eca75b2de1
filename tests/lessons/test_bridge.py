"""From a lesson to the files that do what its reader has just written, and back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from minidist.plain import LADDER
from tests.helpers.links import named_in, names_in

ROOT = Path(__file__).parents[2]
LESSONS = {path.name[:2]: path for path in sorted(ROOT.glob("lessons/[01][0-9]_*.py")) if path.name >= "07"}
RUNGS = [*(f"minidist/plain/{rung}.py" for rung in LADDER), "minidist/comm/algorithms/ring.py"]


def bridge(number: str) -> str:
    """The last section of a lesson, between its heading and the line that names the next lesson."""
    [section] = re.findall(
        r"^# ## Where your lines live\n((?:(?!# ##).*\n)*)# Next: ", LESSONS[number].read_text(), re.MULTILINE
    )
    return str(section)


def test_the_lessons_on_training_have_a_bridge() -> None:
    assert [*LESSONS] == ["07", "08", "09", "10", "11", "12", "13", "14", "15", "16", "17"]


@pytest.mark.parametrize("number", LESSONS)
def test_what_a_bridge_names_is_there(number: str) -> None:
    named = named_in(bridge(number))
    assert len(named) >= 3
    for name, file in named:
        assert name in names_in(ROOT / file), f"{file} has no {name}"
    for file in re.findall(r"\]\(\.\./([^)]*)\)", bridge(number)):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("number", LESSONS)
def test_a_bridge_names_what_the_lesson_has_its_reader_write(number: str) -> None:
    """Each function in the first column is an exercise of the lesson."""
    stubs = re.findall(r"^(?:def|class) (\w+)", LESSONS[number].read_text(), re.MULTILINE)
    rows = re.findall(r"^# \| (.*?) \|", bridge(number), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= {*stubs}


@pytest.mark.parametrize("file", RUNGS)
def test_a_rung_and_its_lesson_name_each_other(file: str) -> None:
    page = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    [(number, title)] = re.findall(r'^Lesson: (\d\d) "(.+)"$', page, re.MULTILINE)
    assert f"# # {int(number)}. {title}\n" in LESSONS[number].read_text()
    assert file in {linked for _, linked in named_in(bridge(number))}
