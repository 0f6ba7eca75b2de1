"""The training ladder as a whole: its table is true, and all its pages have the same shape."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

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
