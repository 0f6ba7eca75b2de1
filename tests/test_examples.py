"""The examples: each learns what it says it learns, however it is started."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import nbformat
import pytest
import torch
from nbclient import NotebookClient

from minidist.comm.launching.cluster import Cluster

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LEARNED = {
    "gan": (40, lambda distance: 0 < distance < 2.1),
    "kmeans": (20, lambda found: 0.4 < found[1] < 0.6),  # 2 features of variance 1/4
    "lora": (20, lambda loss: loss < 5.2),  # log(256) = 5.5 before; most of the model is frozen
    "own_gpt": (20, lambda loss: loss < 4.0),  # log(256) = 5.5 before
    "resnet": (30, lambda accuracy: accuracy > 0.5),
}
"""For each example some steps, and whether the result is what so many steps should reach."""


def module_at(path: Path) -> ModuleType:
    if path.stem == "lora":
        pytest.importorskip("transformers", reason="the example needs transformers")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_learns(cluster_of: Callable[[int], Cluster], path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    steps, learned = LEARNED[path.stem]
    results: list[Any] = cluster_of(2).run(module_at(path).train, steps)
    assert all(learned(result) for result in results), results


def test_k_means_finds_the_corners(cluster_of: Callable[[int], Cluster]) -> None:
    path = next(path for path in EXAMPLES if path.stem == "kmeans")
    for ranks in (1, 2):
        centers, _ = cluster_of(ranks).run(module_at(path).train)[0]
        corners = 4 * torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1], [2, 2]])
        torch.testing.assert_close(
            torch.cdist(corners, centers).amin(1), torch.zeros(5), atol=0.05, rtol=0
        )  # 20,000 rows: a center's standard error is 0.008


@pytest.mark.deep
@pytest.mark.parametrize("start", ["python", "torchrun", "notebook"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_starts_in_every_way(path: Path, start: str) -> None:
    if start == "notebook":
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(path.read_text())])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Jupyter's own packages
            NotebookClient(notebook, timeout=120).execute()
        shown = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [sys.executable, *(torchrun if start == "torchrun" else []), str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    assert re.search(r": \d+\.\d+%?$", shown.strip()), shown
