"""Functions defined in notebook cells run on ranks, and what ranks print appears below the cell."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.helpers.clocks import HANG

CELLS = [
    """
import minidist as md
from minidist import comm
import torch
offset = 100
def talk():
    x = torch.tensor([float(md.rank() + offset)])
    comm.all_reduce(x)
    print("sum", x.item())
    return x.item()
cluster = md.Cluster(ranks=2)
cluster.run(talk)
""",
    """
offset = 200  # a cell that is run again takes effect
cluster.run(talk), md.launch(talk, ranks=2)
""",
    """
def fail():
    if md.rank() == 1:
        raise ValueError("in a cell")
try:
    cluster.run(fail)
except md.RankError as error:
    print(error.summary)
cluster.close()
""",
]


@pytest.mark.deep
def test_notebook_cells_run_on_ranks(tmp_path: Path) -> None:
    import nbformat  # takes four seconds: a check of addresses builds a grammar
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Jupyter's own packages
        NotebookClient(notebook, timeout=HANG, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def outputs(cell: int) -> str:
        return "".join(
            output.get("text", "") or output.get("data", {}).get("text/plain", "")
            for output in notebook.cells[cell].outputs
        )

    assert "[rank 0] sum 201.0\n" in outputs(0)
    assert "[rank 1] sum 201.0\n" in outputs(0)
    assert "[201.0, 201.0]" in outputs(0)
    assert "([401.0, 401.0], [401.0, 401.0])" in outputs(1)
    assert "rank 1 raised ValueError: in a cell" in outputs(2)
