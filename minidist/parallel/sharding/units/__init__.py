"""An n-th of the parameters on each rank (ZeRO 3): when is a unit gathered, reduced and freed?

| File | Holds |
|---|---|
| sharded_parameters.py | `ShardedParameters`: all units of a model; gathered and reduced one by one |
| unit_runtime.py | `UnitRuntime`: a unit is about to run, has run, is reached by the backward pass |
| units.py | `Unit`, a pass over units, and the hooks that show a unit's calls |
| collective_order.py | `settle`: the order of gathers and reductions, the same on all ranks |
| cut_into_units.py | `deal_to_units`, `build`: a model cut into units and shards |
| meta_units.py | `MetaInitializer`: memory for a unit on the meta device |
| gathered_model.py | `summon`: the whole model, between steps; `named_shards`: what this rank has of it |
"""
