"""Links of a page to functions, [`Reducer.arrived`](../file.py), and the names that a file defines."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def names_in(path: Path) -> set[str]:
    """Every class, function, method and variable that a file defines: "Reducer", "Reducer.arrived"."""
    found = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(path.read_text()).body, "")
    return found


def named_in(text: str) -> list[tuple[str, str]]:
    """(name, file) for each link to a name in a file of the folder above the page's."""
    return re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", text)
