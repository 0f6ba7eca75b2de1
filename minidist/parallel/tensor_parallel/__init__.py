"""Tensor parallelism: ranks share each matrix of a model, and combine their results inside every layer.

Start with `parallelize`, which cuts a model by a plan. The layers can also be used by themselves.

| File | Holds |
|---|---|
| replace_layers.py | `parallelize`: cut a model, by a plan of styles; the table of styles |
| plans.py | `plan_for`: the plan of a GPT, or of a model of transformers |
| styles.py | a plan resolved to modules and checked |
| heads.py | cuts between attention heads, and modules that count them |
| linear_layers.py | layers cut by their outputs (`ColumnParallelLinear`) or inputs (`RowParallelLinear`) |
| vocabulary.py | an embedding cut by rows; a cross entropy that never holds all logits |
| sequence_parallel.py | norms, dropout and attention that work on a rank's own tokens or heads |
| operators.py | collectives forward and backward between whole and shared parts |
| shares.py | which rows, columns or heads each rank has; without torch |
| cuts.py | where a tensor is cut between ranks; a rank's part of a whole layer |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.parallel.tensor_parallel.operators import gather_sequence as gather_sequence
    from minidist.parallel.tensor_parallel.replace_layers import parallelize as parallelize

__getattr__, __dir__, __all__ = lazy(__name__)
