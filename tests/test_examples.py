"""The examples: each learns what it says it learns, however it is started."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Clusters
from tests.helpers import warm_python
from tests.helpers.clocks import HANG

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[!b]*.py"))  # bench_*: a benchmark
LEARNED = {
    "gan": (40, lambda distance: 0 < distance < 2.1),
    "kmeans": (20, lambda found: 0.4 < found[1] < 0.6),  # 2 features of variance 1/4
    "lora": (20, lambda loss: loss < 5.2),  # log(256) = 5.5 before; most of the model is frozen
    "own_gpt": (20, lambda loss: loss < 4.0),  # log(256) = 5.5 before
    "resnet": (30, lambda accuracy: accuracy > 0.5),
}
"""For each example some steps, and whether the result is what so many steps should reach."""


def trained(path: Path, *steps: int) -> Any:
    """What an example learns on this rank: only ranks import it, and with it transformers."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.train(*steps)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_learns(cluster_of: Clusters, path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    if path.stem == "lora" and importlib.util.find_spec("transformers") is None:
        pytest.skip("the example needs transformers")
    steps, learned = LEARNED[path.stem]
    results: list[Any] = cluster_of(2).run(trained, path, steps)
    assert all(learned(result) for result in results), results


def test_k_means_finds_the_corners(cluster_of: Clusters) -> None:
    path = next(path for path in EXAMPLES if path.stem == "kmeans")
    for ranks in (1, 2):
        centers, _ = cluster_of(ranks).run(trained, path)[0]
        corners = 4 * torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1], [2, 2]])
        assert torch.cdist(corners, centers).amin(1).max() < 0.05  # their standard error is 0.008


def check_shown(text: str) -> None:
    """An example ends with what it has learned: a number."""
    assert re.search(r": \d+\.\d+%?$", text.strip()), text


@pytest.mark.deep
@pytest.mark.parametrize("words", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_started_by_python_and_by_torchrun(path: Path, words: tuple[str, ...]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", warm_python.CHILDREN: "2"}
    done = warm_python.run([sys.executable, *words, str(path)], timeout=HANG, env=environment)
    assert done.returncode == 0, done.stderr
    check_shown(done.stdout)


@pytest.mark.deep
def test_every_example_runs_in_a_notebook() -> None:
    """In one kernel, which imports torch once; each example begins without the names of the one before."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(text) for path in EXAMPLES for text in ("%reset -f", path.read_text())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings(), warm_python.kernels():
        warnings.simplefilter("ignore")  # warnings of Jupyter's own packages
        NotebookClient(notebook, timeout=HANG, shutdown_kernel="immediate").execute()
    for cell in notebook.cells[1::2]:
        check_shown("".join(output.get("text", "") for output in cell.outputs))
