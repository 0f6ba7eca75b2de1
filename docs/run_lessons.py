"""Run the lessons with their solutions, for the outputs that the site shows: `python docs/run_lessons.py`.

Each notebook with its outputs is kept in build/lessons, and runs again only once its cells have changed. All
eighteen take three to four minutes on two cores. A lesson that fails is named, and shown without outputs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXECUTED = ROOT / "build" / "lessons"
CELL_LIMIT = 300  # seconds; a crowded machine is no error


def main(stems: list[str]) -> int:
    """Run the lessons that have changed, or those with these names; returns how many failed."""
    sys.path[:0] = [os.fspath(ROOT / "lessons"), os.fspath(ROOT)]
    from checks.support import notebooks

    failed = 0
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for source in notebooks.sources():
        notebook = solved(notebooks.notebook(source), source)
        if (stems and source.stem not in stems) or is_fresh(source.stem, notebook.cells):
            continue
        print(f"running {source.stem}", flush=True)
        try:
            execute(notebook)
        except Exception as error:
            failed += 1
            print(f"  it failed, and is shown without outputs: {str(error).strip().splitlines()[-1]}")
            continue
        (EXECUTED / f"{source.stem}.ipynb").write_text(json.dumps(notebook))
    return failed


def solved(notebook: Any, source: Path) -> Any:
    """The notebook with each exercise's stub replaced by its solution."""
    from minidist.cli.lessons_export import definitions

    answers = definitions((source.parent / "solutions" / source.name).read_text())
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", ()):
            cell.source = "\n\n\n".join(answers[name] for name in definitions(cell.source))
    return notebook


def is_fresh(stem: str, cells: list[Any]) -> bool:
    """Whether there are outputs of just these cells."""
    path = EXECUTED / f"{stem}.ipynb"
    if not path.exists():
        return False
    kept = json.loads(path.read_text())["cells"]
    return [cell["source"] for cell in kept] == [cell["source"] for cell in cells]


def execute(notebook: Any) -> None:
    """Run all cells in a kernel of their own; what is solved here is nobody's progress."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Jupyter's own packages warn of
        from nbclient import NotebookClient
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINIDIST_LESSONS_PROGRESS"] = os.fspath(Path(folder) / "progress.json")
        resources = {"metadata": {"path": os.fspath(ROOT / "lessons")}}
        NotebookClient(notebook, timeout=CELL_LIMIT, resources=resources, allow_errors=False).execute()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
