"""Classes for a training loop of your own: each is a face of the mechanism that an engine uses.

| File | Holds |
|---|---|
| data_parallel.py | `DataParallel`: gradients are averaged after each backward pass |
| zero.py | `ZeroOptimizer`: an optimizer of this rank's share |
| consolidated_state.py | `ConsolidatedState`: all shares as the state of a plain optimizer, and dealt again |
| fully_shard.py | `FullyShard`: gather a unit, compute, free it; step on the shards |
| loop_classes.py | `delegated`: what the three have in common, and what they refuse |
"""
