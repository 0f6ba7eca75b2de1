"""Find out where training goes wrong: compare two layouts, and check that ranks hold the same model.

| File | Holds |
|---|---|
| compare.py | `compare`: the first layer at which two layouts differ by more than rounding |
| recording.py | `record`: what layers compute in a few steps, whole and in order, and what rounding changes |
| in_sync.py | `assert_in_sync`: the ranks' copies of a model are equal |
"""
