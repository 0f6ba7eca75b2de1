"""The training ladder as a whole: its table is true, and all its pages have the same shape."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import minidist as md
from minidist import plain

ROOT = Path(__file__).parents[2]
FILES = sorted(path.stem for path in (ROOT / "minidist/plain").glob("*.py") if path.stem != "__init__")


def test_the_table_names_the_rungs_in_the_order_of_reading() -> None:
    assert tuple(re.findall(r"\| (\w+)\.py \|", plain.__doc__ or "")) == plain.LADDER
    assert set(FILES) - {"gpt"} == set(plain.LADDER)


@pytest.mark.parametrize("rung", plain.LADDER)
def test_a_rung_is_a_page(rung: str) -> None:
    module = importlib.import_module(f"minidist.plain.{rung}")
    assert len(inspect.getsource(module).splitlines()) <= 120
    parameters = inspect.signature(module.train, eval_str=True).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    assert needed == ["model", "batches", "make_optimizer"]
    imported = {
        name
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minidist")
        for name in [f"{node.module}.{alias.name}" for alias in node.names]
    }
    assert all(name == "minidist.comm" or name.startswith("minidist.plain.gpt.") for name in imported)


def test_the_example_runs(
    cluster_of: Callable[[int], md.Cluster],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [example] = re.findall(r"^(    import functools.*)", inspect.getsource(plain), re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(md, "launch", lambda train, ranks: cluster_of(ranks).run(train))
    exec(textwrap.dedent(example.partition('"""')[0]), {})
    losses = ast.literal_eval(capsys.readouterr().out)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
