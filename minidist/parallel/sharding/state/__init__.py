"""The training state by the parameters' names: what a checkpoint saves of this rank, and how it loads.

| File | Holds |
|---|---|
| state_by_name.py | `StateByName`: the boxes of each parameter's state that this rank saves |
| consolidated_state.py | `ConsolidatedState`: all shares as the state of a plain optimizer, and dealt again |
"""
