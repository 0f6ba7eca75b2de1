"""Layouts: what they accept, and what they say of what they do not."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import minidist as md
from minidist.parallel.contract.recompute_policies import POLICIES
from tests.helpers.refusals import refuses


@pytest.mark.parametrize(
    "layout",
    [
        md.Layout(),
        md.Layout(dp=4),
        md.Layout(dp=2, tp=2, zero=1, precision="bf16", recompute=True),
        *(md.Layout(recompute=name) for name in POLICIES),
        md.Layout(tp=2, pp=2, cp=2, sequence_parallel=True, schedule="interleaved", chunks=2),
    ],
)
def test_text_and_back(layout: md.Layout) -> None:
    assert md.Layout.parse(str(layout)) == layout


test_wrong_text = refuses(
    md.Layout.parse,
    ("dp", "write it as name=value"),
    ("dp=two", "dp is 'two'; give a whole number"),
    ("dp=0", "dp is 0; give at least 1"),
    ("dp=-2", "dp is -2"),
    ("microbatches=2", "did you mean 'micro_batches'"),
    ("dp=2,dp=3", "gives dp twice"),
    ("zero=4", "zero is 4; give stage 1, 2 or 3"),
    ("precision=fp4", "unknown precision 'fp4'"),
    ("recompute=maybe", "recompute is 'maybe'; give True or False, or the name of a policy: "),
    ("pp=2,schedule=zero_bubble,recompute=attention alone", "recompute is 'attention alone' with schedule"),
    ("cp=0", "cp is 0; give at least 1"),
    ("pp=2,schedule=gpip", "unknown schedule 'gpip'.*'gpipe'"),
    ("schedule=gpipe", "schedule is 'gpipe' and chunks 1 with pp=1"),
    ("pp=2,chunks=2", "chunks is 2 with schedule='1f1b'; a layout has chunks of 2 or more with"),
    ("pp=2,schedule=interleaved", "chunks is 1 with schedule='interleaved'"),
    ("pp=2,schedule=zero_bubble,recompute=true", "so that none is left to fill the bubble"),
    ("sequence_parallel=true", "sequence_parallel is True with tp=1"),
)


def test_true_is_every_layer() -> None:
    assert md.Layout(recompute="every layer") == md.Layout(recompute=True)
    for value in (1, None, 0.5):
        with pytest.raises(TypeError, match=r"recompute is .*; give True or False"):
            md.Layout(recompute=value)  # type: ignore[arg-type]


def test_help_and_the_table_say_what_each_field_is() -> None:
    names = [field.name for field in fields(md.Layout)]
    arguments = (inspect.getdoc(md.Layout) or "").partition("Raises:")[0]
    said = re.findall(r"^ {4}(\w+): \S", arguments, re.MULTILINE)
    page = (Path(__file__).parents[3] / "docs" / "strategies" / "index.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)
    assert sorted(said) == sorted(table) == sorted(names)
