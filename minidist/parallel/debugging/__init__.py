"""Find out where training goes wrong: compare layouts, ranks, and any library's training with one process.

| File | Holds |
|---|---|
| compare.py | `compare`: the first layer at which two layouts differ by more than rounding |
| recording.py | `record`: what layers compute in a few steps, whole and in order, and what rounding changes |
| detectors.py | `detect`: what differs between a training on ranks, of any library, and one process |
| in_sync.py | `assert_in_sync`: the ranks' copies of a model are equal |
"""
