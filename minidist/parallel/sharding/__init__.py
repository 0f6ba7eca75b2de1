"""Data parallelism and ZeRO 1 to 3: what the ranks that train one model together share, and what each keeps.

All four are one idea: parameters and gradients lie in flat buckets, each element has an owner, and a table
says what is resident, that is whole on every rank between steps, and what each rank keeps only its share of:

| | parameters | gradients | optimizer state | for a loop | for an engine |
|---|---|---|---|---|---|
| data parallel | whole | whole | whole | `DataParallel` | `Replicated` |
| ZeRO 1 | whole | whole | 1/n | `ZeroOptimizer(stage=1)` | `ShardedState` |
| ZeRO 2 | whole | 1/n | 1/n | `ZeroOptimizer(stage=2)` | `ShardedState` |
| ZeRO 3 | 1/n | 1/n | 1/n | `FullyShard` | `FullySharded` |

Where each stage gives memory back:

- ZeRO 1 and 2 give the optimizer only this rank's slices of the buckets: `OptimizerSlices.add`.
- ZeRO 2 throws whole gradients away in reduce_to_owner.py: `ShardAssignment.moved` sets `grad` to None once a
  gradient is copied into its bucket, and `_ToOwners.complete` takes the bucket's memory back after its
  reduce-scatter. This rank's share of the sums stays in `ShardBucket.reduced`.
- ZeRO 3 also throws whole parameters away after a unit's pass: `FlatParameter.free`.

The files, in the order in which to read them; ../flat/ comes first:

| File | Holds |
|---|---|
| data_parallel.py | `DataParallel`: gradients are averaged after each backward pass |
| reducer.py | `Reducer`: a gradient has arrived; full buckets are sent while backward runs; a round ends |
| bucket_assignment.py | `BucketAssignment`: which gradients share a bucket, agreed by all ranks |
| data_parallel_strategy.py | `Replicated`: data parallelism for an engine |
| **ZeRO 1 and 2** | |
| zero.py | `ZeroOptimizer`: reduce to owners, update the share, publish it |
| zero_buckets.py | `ShardBucket`: a flat bucket of parameters and gradients, one share for each rank |
| zero_partition.py | `Partition`: deals parameters to buckets in the order of the first backward pass |
| reduce_to_owner.py | `ShardAssignment`: a round of reduce-scatters; what stays of the gradients |
| optimizer_slices.py | `OptimizerSlices`: what the optimizer updates of the share, and masters |
| elementwise_optimizers.py | which optimizers may update a part of a parameter |
| zero_state.py | the state of a plain optimizer, collected from the owners and dealt to them |
| zero_strategy.py | `ShardedState`: ZeRO 1 and 2 for an engine |
| **ZeRO 3** | |
| fully_shard.py | `FullyShard`: gather a unit, compute, free it; step on the shards |
| units.py, meta_units.py | a model cut into units and shards; memory for one on the meta device |
| unit_hooks.py, unit_runtime.py | hooks that show a unit is about to run; what they gather, reduce and free |
| collective_order.py | the order of gathers and reduces, the same on all ranks; how far a pass has come |
| unit_gradients.py | a unit's gradients, reduced to their owners |
| flat_shards.py, parameter_groups.py | this rank's shards as a few long tensors; the optimizer's groups |
| optimizer_wrapper.py | the step of the optimizer: complete the gradients, update, publish |
| offload.py | shards in CPU memory or in files |
| fully_shard_strategy.py | `FullySharded`: ZeRO 3 for an engine |
| **All** | |
| arguments.py | checks of arguments |
"""
