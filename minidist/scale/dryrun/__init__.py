"""The training's own code, run as one rank of a layout of any size, without other ranks or data.

It counts exactly what the rank sends and holds, on one core and in little memory.

| File | Holds |
|---|---|
| one_rank.py | `dryrun` |
| transformer.py | GPT and BERT: known by their shape |
| own_model.py | a model of your own: known by its sizes and the passes of two small batches, measured |
| fake_tensors.py | tensors without data |
| fake_world.py | a process group that answers for the other ranks; which ranks are alike |
| calls.py | calls with their axis and phase |
| dryrun_report.py | tables and JSON |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.scale.dryrun.one_rank import DryRun as DryRun
    from minidist.scale.dryrun.one_rank import dryrun as dryrun

__getattr__, __dir__, __all__ = lazy(__name__)
