"""The playground says of memory what the library says, to the byte, in a Python without torch and NumPy."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minidist.cli.commands import app
from minidist.parallel.contract.layout import Layout
from tests.helpers.fresh_python import output_of
from tests.helpers.memory_requests import cases, library

ROOT = Path(__file__).parent.parent
PROGRAM = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "rich"):
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
import playground_memory
print(playground_memory.choices())
for request in sys.argv[1:]:
    print(playground_memory.answer(request))
"""


def bare(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices, then the answers, of a Python that has neither torch nor NumPy."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "docs")])
    answers = output_of(PROGRAM, *map(json.dumps, requests), PYTHONPATH=path)
    return [json.loads(line) for line in answers.splitlines()]


def test_answers_equal_the_library() -> None:
    requests = cases(200)
    choices, *answers = bare(requests)
    assert {request["model"] for request in requests} == {*choices["models"]}
    wanted = [library(request) for request in requests]
    assert 10 < sum("error" in want for want in wanted) < 70
    assert answers == wanted


def test_answers_equal_the_command_line() -> None:
    options = "--model gpt2-medium --ranks 4 --memory 24GB --profile a100 --batch 16 --tokens 512 --json"
    done = CliRunner().invoke(app, ["plan", *options.split()])
    printed = json.loads(done.stdout)["fitting"]
    # A second copy of the parameters is an option of `prepare`, and no part of a layout.
    printed = [each for each in printed if not each.get("secondary")]
    assert len({each["layout"] for each in printed}) > 5
    layouts = [Layout.parse(each["layout"]) for each in printed]
    asked = [
        {"model": "gpt2-medium", "tokens": 512, "memory": "24GB"}
        | {"layout": dataclasses.asdict(layout), "rows": 16 // layout.dp}
        for layout in layouts
    ]
    _, *answers = bare(asked)
    for each, layout, answer in zip(printed, layouts, answers, strict=True):
        found = answer["stages"][str(layout.zero)]
        assert answer["layout"] == each["layout"]
        assert {part: found[part][0] for part in found} == {
            **{part: each["memory"][part] for part in found if part != "temporary"},
            "temporary": each["memory"]["transient"],
        }
        assert answer["rows"] * layout.dp >= 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": "80"}, "memory is '80' without a unit"),
        ({"layout": {"pp": 2, "zero": 3}}, "zero=3 with pp=2 in the layout would send parameters"),
        ({"tokens": 5000}, "batch is 32 rows of 5000 tokens"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], said: str) -> None:
    request = {"model": "gpt2-small", "layout": {"dp": 8}, "rows": 4, "tokens": 128, "memory": "16GB"}
    _, answer = bare([request | changes])
    assert answer["error"].startswith(said)
