"""Data parallelism and ZeRO 1 to 3: what the ranks that train one model together share, and what each keeps.

All four are one mechanism. Parameters lie one after the other in flat buckets (../flat/buckets.py), each
element has an owner, and a table says what every rank keeps whole between steps (../contract/residency.py).
Of the rest it keeps its share, an n-th:

| | parameters | gradients | optimizer state | in a loop of your own |
|---|---|---|---|---|
| data parallel | whole | whole | whole | `DataParallel` |
| ZeRO 1 | whole | whole | 1/n | `ZeroOptimizer(stage=1)` |
| ZeRO 2 | whole | 1/n | 1/n | `ZeroOptimizer(stage=2)` |
| ZeRO 3 | 1/n | 1/n | 1/n | `FullyShard` |

An engine has one strategy for all of them, `Sharded`, which is plain data parallelism too: in the first row
only sums of gradients are shared. The classes of the last column are for people's own loops. A model has one
set of parameters, or several, such as experts: each with its row and its ranks (`ParameterSet`). A bucket's
gradients are complete when the last of them has arrived (`Reducer`) or, where parameters are not whole, when
the backward pass has left a unit of the model (`UnitRuntime`). Then the bucket is reduced (`Bucket.reduce`),
the optimizer updates this rank's slices (`OptimizerSlices.update`), and the shares are published
(`Bucket.gather`). With hybrid sharding n is the size of a group, and each share has an owner in every group
(`GradientComm.hybrid`).

Where memory is given back:

- ZeRO 1 and above give the optimizer only this rank's slices of the buckets: `OptimizerSlices.add`.
- ZeRO 2 and above let go of gradients that this rank does not own: `Bucket.give_back`.
- ZeRO 3 also lets go of whole parameters after a unit's pass: `Bucket.free`.

| File | Holds |
|---|---|
| ../contract/residency.py | the table, and what follows from a row |
| sharded.py | `Sharded`: the strategy for an engine |
| parameter_set.py | `ParameterSet`: parameters shared in one way, and the rounds of their gradients |
| all_parameters.py | `AllParameters`: all sets together: the norm of their gradients, clipping |
| whole_parameters.py | `WholeParameters`: whole on every rank; their gradients are summed as they come |
| dealing.py | `Dealer`: deals them to buckets, in the order of a backward pass |
| equal_start.py | `start_equal`: ranks begin with the same values |
| sharded_parameters.py | `ShardedParameters`: an n-th on each rank; gathered and reduced unit by unit |
| gathered_model.py | `summon`: the whole model, between steps; `named_shards`: what this rank has of it |
| whole_on_owners.py | `WholeOnOwners`: those of them that the optimizer needs whole, on an owner each |
| reducer.py | `Reducer`: a gradient has arrived; full buckets are sent while backward runs; a round ends |
| optimizer_slices.py | `OptimizerSlices`: this rank's part of the optimizer's step, masters and state |
| state_by_name.py | `StateByName`: the training state by the parameters' names, for checkpoints |
| data_parallel.py | `DataParallel`: for a loop; gradients are averaged after each backward pass |
| zero.py | `ZeroOptimizer`: for a loop; an optimizer of this rank's share |
| consolidated_state.py | `ConsolidatedState`: its state as a plain optimizer's, collected, and dealt again |
| fully_shard.py | `FullyShard`: for a loop; gather a unit, compute, free it; step on the shards |
| units.py | `Unit`, a pass over units, and the hooks that show a unit's calls |
| unit_runtime.py | `UnitRuntime`: a unit is about to run; what is gathered, reduced and freed, and when |
| collective_order.py | the order of gathers and reductions, the same on all ranks |
| cut_into_units.py, meta_units.py | a model cut into units and shards; memory for one on the meta device |
| memory_source.py | where shards, masters and state lie: on the device, in CPU memory, in files |
| parameter_groups.py | the optimizer's groups over flat shards |
| loop_means.py | `LoopMeans`: gradients as means over rows or weights, for data parallelism |
| loop_classes.py | what the three classes for loops have in common, and what they refuse |
"""
