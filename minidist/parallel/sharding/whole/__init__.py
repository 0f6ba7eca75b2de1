"""Parameters whole on every rank (data parallelism, ZeRO 1 and 2): when is a bucket of gradients sent?

| File | Holds |
|---|---|
| whole_parameters.py | `WholeParameters`: gradients are summed as they come; `WithSharedState`: ZeRO 1, 2 |
| reducer.py | `Reducer`: a gradient has arrived; full buckets are sent while backward runs; a round ends |
| dealing.py | `Dealer`: deals gradients to buckets, in the order of a backward pass |
"""
