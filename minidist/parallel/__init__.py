"""Strategies: several ranks train one model, to the weights that one process would have reached.

A package imports only from the floors below it:

| Floor | Package | Holds |
|---|---|---|
| 6 | debugging/ | `compare`: where two layouts differ; `assert_in_sync`: whether ranks hold the same model |
| 5 | engine/ | `prepare`, `Engine`, the training step, a rank's part of the model and where it lies |
| 4 | sharding/ | data parallelism and ZeRO 1 to 3 |
| 4 | pipeline/ | schedules (the order of 1F1B is made in schedules.py), their proof and their execution |
| 4 | tensor/ | layers cut by columns, rows or vocabulary; the plans that say how |
| 3 | training/ | precision, master weights, clipping, recomputation, memory |
| 3 | averaging/ | parameter server, local SGD |
| 3 | experts/ | tokens travel to the ranks of their experts; balance; replicas |
| 2 | contract/ | `Layout`, `Strategy`, records of schedules and recomputation policies, the training state |
| 2 | compression/ | float16, top-k, PowerSGD, sparse rows |
| 1 | context/ | ring attention, Ulysses, a share of a sequence |
| 1 | flat/ | parameters in flat buckets, and ranges of them |
| 1 | guards/ | who trains a parameter, what is refused, what ranks must agree on |

| Where ... | Function | File |
|---|---|---|
| are gradients averaged, in data parallelism and in ZeRO? | `Bucket.reduce` | flat/buckets.py |
| does the backward pass find that a bucket is full? | `Reducer.arrived` | sharding/reducer.py |
| does ZeRO 2 let go of gradients that others own? | `Bucket.give_back` | flat/buckets.py |
| does ZeRO 3 gather a unit, and the next one ahead? | `UnitRuntime.begin` | sharding/unit_runtime.py |
| does the optimizer update this rank's part? | `OptimizerSlices.update` | sharding/optimizer_slices.py |
| is it said who keeps what, for each stage of ZeRO? | `ROWS` | contract/residency.py |
| are gradients clipped, and steps with an overflow skipped? | `Engine._train` | engine/training_step.py |
| do micro-batches add up their gradients? | `WholePasses.train` | engine/step_executor.py |
| does the loss get its scale in fp16? | `LossScale` | training/precision.py |
| are float32 copies of the weights updated? | `optimizer_of_masters` | training/master_weights.py |
| are activations computed again? | `recompute` | training/recompute.py |
| does a compression keep back what it has not sent? | `Reduction` | compression/compressor.py |
| is 1F1B's order made? | `one_f_one_b` | pipeline/schedules.py |
| is a schedule executed, pass by pass? | `ScheduleRun.execute` | pipeline/execution.py |
| do activations go to the next stage? | `StageMessages.send` | pipeline/stage_messages.py |
| is a model cut into stages? | `partition_model` | engine/partition_model.py |
| are the gradients of tied embeddings added up? | `sum_tied` | pipeline/tied_parameters.py |
| does tensor parallelism send its all-reduce? | `reduce_from_ranks` | tensor/operators.py |
| is it said how a model of transformers is cut? | `plan_for` | tensor/plans.py |
| does a rank take its tokens of a long row? | `SequenceShare.cut` | context/sequence_share.py |
| does a token travel to its expert? | `share_experts` | experts/expert_parallel.py |
| do ranks draw the same or other dropout masks? | `own_random_state` | training/random_state.py |
| is a step compared with one process alone? | `Rehearsal.step` | engine/rehearsal.py |
| is it said what a checkpoint saves of this rank? | `StateByName.boxes` | sharding/state_by_name.py |
| is a layout refused? | `check_available` | contract/layout.py |

schedules.py, tensor_parallel.py, context_parallel.py, layerwise.py and sequence_share.py are public import
paths; the code is in the packages.

To add a strategy:

1. Implement `Strategy` (contract/strategy.py) in a package of floor 4. It communicates through
   `minidist.comm` alone, and imports no other strategy.
2. Give `Layout` (contract/layout.py) a field or a value that selects it. Make it in `prepare`
   (engine/prepare.py), and refuse the axes that it does not work with in `check_available`
   (contract/layout.py).
3. Add it to the models of memory (scale/memory/state_bytes.py) and time (scale/time/gradient_exchange.py),
   and to the layouts that the planner tries (scale/planning/candidates.py).
4. Add its layouts to tests/parallel/test_layouts.py. These tests hold it to the contract in
   tests/helpers/contract.py: in float64, every parameter equals single-process training to 1e-10.

To add a pipeline schedule, write a function from ranks, micro-batches and chunks to each rank's passes in
pipeline/schedules.py, and its record in `SCHEDULES`, contract/schedule_kinds.py. `Layout`, `Pipeline`, the
planner, the models of memory and time, benchmarks, tests, docs and the playground read that record. A
recomputation policy is a function and a record too, in contract/recompute_policies.py. A stage of ZeRO is a
row in contract/residency.py, a compression a name in compression/by_name.py, a number format of FP8 a record
in contract/fp8_recipes.py, and an optimizer that updates elements alone a class in training's `ELEMENTWISE`
(training/elementwise_optimizers.py).
"""
