"""Data parallelism and ZeRO 1 to 3: what the ranks that train one model together share, and what each keeps.

All four are one mechanism. Parameters lie one after the other in flat buckets (../flat/buckets.py), each
element has an owner, and a table says what every rank keeps whole between steps; of the rest it keeps its
share, an n-th:

| | parameters | gradients | optimizer state | for a loop | for an engine |
|---|---|---|---|---|---|
| data parallel | whole | whole | whole | `DataParallel` | `Replicated` |
| ZeRO 1 | whole | whole | 1/n | `ZeroOptimizer(stage=1)` | `ShardedState` |
| ZeRO 2 | whole | 1/n | 1/n | `ZeroOptimizer(stage=2)` | `ShardedState` |
| ZeRO 3 | 1/n | 1/n | 1/n | `FullyShard` | `FullySharded` |

Two events drive it: a gradient has arrived (`Reducer`), and in ZeRO 3 a unit of the model is about to run
(`UnitRuntime`). Then a bucket is reduced to the owners of its shares (`Bucket.reduce`), the optimizer updates
this rank's slices (`OptimizerSlices.step`), and the shares are published (`Bucket.gather`). With hybrid
sharding n is the size of a group, and each share has an owner in every group (`GradientComm.hybrid`).

Where each stage gives memory back:

- ZeRO 1 and 2 give the optimizer only this rank's slices of the buckets: `OptimizerSlices.add`.
- ZeRO 2 throws whole gradients away: `ShardAssignment.moved` (reduce_to_owner.py) sets `grad` to None once a
  gradient is copied into its bucket, and the end of `Bucket.reduce` gives the bucket's memory to the next.
- ZeRO 3 also throws whole parameters away after a unit's pass: `Bucket.free`.

| File | Holds |
|---|---|
| reducer.py | `Reducer`: a gradient has arrived; full buckets are sent while backward runs; a round ends |
| data_parallel.py | `DataParallel`: gradients are averaged after each backward pass |
| bucket_assignment.py | `BucketAssignment`: which gradients share a bucket, agreed by all ranks |
| data_parallel_strategy.py | `Replicated`: data parallelism for an engine |
| zero.py | `ZeroOptimizer`: reduce to owners, update the share, publish it |
| partition.py | `Partition`: deals parameters to buckets in the order of the first backward pass |
| reduce_to_owner.py | `ShardAssignment`: a round of reduce-scatters; what stays of the gradients |
| optimizer_slices.py | `OptimizerSlices`: this rank's part of the optimizer's step, and masters |
| slice_state.py | `SliceState`: slices are cut and joined with their state |
| memory_source.py | where shards, masters and state lie: on the device, in CPU memory, in files |
| fully_shard.py | `FullyShard`: gather a unit, compute, free it; step on the shards |
| cut_into_units.py, meta_units.py | a model cut into units and shards; memory for one on the meta device |
| units.py | `Unit`, a pass over units, and the hooks that show a unit's calls |
| unit_runtime.py | `UnitRuntime`: a unit is about to run; what is gathered, reduced and freed, and when |
| collective_order.py | the order of gathers and reductions, the same on all ranks |
| unit_sharding.py | `UnitSharding`: a unit's gradients reduced; the step on the shards |
| parameter_groups.py | the optimizer's groups over flat shards |
| sharded_strategies.py | `ShardedState` and `FullySharded`: ZeRO for an engine |
| state_by_name.py | the training state in shares, by the parameters' names, for checkpoints |
| consolidated_state.py | the state of a plain optimizer, collected from the owners and dealt to them |
| arguments.py | checks of arguments |
"""
