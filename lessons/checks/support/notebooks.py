"""Make each lesson's .ipynb from its .py: `make notebooks`, or `python lessons/checks/support/notebooks.py`.

jupytext reads the .py and writes the notebook; the cells' ids, which it draws at random, are here their
numbers, so that the same .py always gives the same bytes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

LESSONS = Path(__file__).parents[2]


def sources() -> list[Path]:
    """The lessons' .py files, in order."""
    return sorted(LESSONS.glob("[0-9][0-9]_*.py"))


def notebook(source: Path) -> Any:
    """A lesson as a notebook, without outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Jupyter's own packages warn of is not ours to mend
        import jupytext

        made = jupytext.read(source)
    for place, cell in enumerate(made.cells):
        cell["id"] = f"cell-{place:03d}"
    made.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return made


def text(source: Path) -> str:
    """What its .ipynb has to be."""
    import nbformat

    return nbformat.writes(notebook(source)) + "\n"


def write_all() -> list[Path]:
    """Write those that are not yet as they have to be; which they were."""
    written = []
    for source in sources():
        path, new = source.with_suffix(".ipynb"), text(source)
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            path.write_text(new, encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    for path in write_all():
        print(path.name)
    sys.exit(0)
