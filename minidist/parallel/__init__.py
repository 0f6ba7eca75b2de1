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
recomputation policy is a function and a record too, in contract/recompute_policies.py.
"""
