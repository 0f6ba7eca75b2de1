"""The command judge: problems, verdicts, a leaderboard."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.kernels.judge import PROBLEMS
from tests.conftest import Run

PAGE = Path(__file__).parents[2] / "docs/ladders/judge.md"
EXAMPLE = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
TEXT = EXAMPLE + "def reduction(x, out):\n    launch(add_one, 1, 32, x, x, out)\n"


def test_problems_are_listed_and_shown(run: Run) -> None:
    code, out, _ = run("judge", "--list")
    assert (code, [line.partition("(")[0] for line in out.splitlines()]) == (0, [*PROBLEMS])
    code, out, _ = run("judge", "--show", "softmax", "--json")
    assert json.loads(out)["softmax"]["par"] == PROBLEMS["softmax"].par
    assert "m = 64, n = 1024" in run("judge", "--show", "softmax")[1]


def test_a_file_is_judged_and_what_passes_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user starts it, in an interpreter of its own; the file's name is that of a module of Python's."""
    file, table = tmp_path / "types.py", tmp_path / "scores.csv"
    file.write_text(TEXT)
    code, out, err = run("judge", str(file), "--table", str(table), "--name", "a, b")
    header, add, reduction = out.splitlines()
    assert (code, err, header.split()[:4]) == (1, "", ["problem", "score", "cost", "par"])
    assert len(header) == len(add) <= 100
    score = int(add.split()[1])
    assert add.split()[:4] == ["add", str(score), add.split()[2], f"{PROBLEMS['add'].par:,}"]
    assert 0 < score < 100
    assert reduction.split()[:2] == ["reduction", "0"]
    assert "is right: 1 of 1 elements are wrong" in reduction

    monkeypatch.chdir(tmp_path)
    row = table.read_text().splitlines()[1]
    again = row.replace(f",{score},", ",9.5,")
    table.write_text(f"{table.read_text()}{again}\n{row}\n")
    code, out, _ = run("judge", "types.py", "add", "--table", "scores.csv", "--json")
    assert (code, json.loads(out)["add"]["score"]) == (0, score)
    rows = [*csv.DictReader(table.read_text().splitlines())]
    assert [(row["problem"], row["name"], row["score"]) for row in rows] == [
        ("add", "a, b", str(score)),
        ("add", "types", str(score)),
    ]
    assert rows[0]["sectors"] == "24576"
    assert rows[0]["date"] <= rows[1]["date"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a file to judge; minidist judge --list has the problems"),
        (["none.py"], "none.py cannot be read"),
        (["--show", "softmx"], "unknown problem 'softmx': did you mean 'softmax'?"),
        (["none.py", "ad"], "unknown problem 'ad': did you mean 'add'?"),
        (["none.py", "--table", "other.csv"], "--table other.csv is no leaderboard of minidist judge"),
        (["none.py", "--table", "."], "--table . is a folder"),
        (["empty.py"], "empty.py defines no function named after a problem: add, transpose"),
    ],
)
def test_bad_input_is_a_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("problem,score\nadd,1\n")
    Path("empty.py").write_text("x = 1\n")
    code, out, err = run("judge", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
