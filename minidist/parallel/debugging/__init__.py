"""Find out where training goes wrong: compare two layouts, and check that ranks hold the same model.

| File | Holds |
|---|---|
| compare.py | `compare`: the first layer at which two layouts differ by more than rounding |
| recording.py | `record`: outputs, gradients and updates of an engine's layers, and what rounding changes |
| layer_order.py | a model's layers, and the order in which they run |
| assembling.py | whole tensors from the pieces of all ranks |
| in_sync.py | `assert_in_sync`: the ranks' copies of a model are equal |
"""
