"""Strategies: several ranks train one model, to the weights that one process would have reached.

A package imports only from the floors below it:

| Floor | Package | Holds |
|---|---|---|
| 7 | debugging/ | `compare`: where two layouts differ; `assert_in_sync`: whether ranks hold the same model |
| 6 | engine/ | `prepare`, `Engine`, the training step, a rank's part of the model and where it lies |
| 5 | layerwise/ | where a model is cut into stages; one batch through the ranks' layers |
| 4 | sharding/ | data parallelism and ZeRO 1 to 3 |
| 4 | pipeline/ | executes a schedule: stages, and the messages between them |
| 4 | tensor_parallel/ | layers cut by columns, rows or vocabulary; the plans that say how |
| 3 | schedules/ | the order of passes in a pipeline (GPipe, 1F1B, ...), its proof and its simulation |
| 3 | training/ | precision, master weights, clipping, recomputation, memory |
| 3 | averaging/ | parameter server, local SGD |
| 3 | experts/ | tokens travel to the ranks of their experts; balance; replicas |
| 2 | contract/ | `Layout`, `TensorBox`, records of schedules and recomputation policies, the training state |
| 2 | compression/ | float16, top-k, PowerSGD, sparse rows |
| 2 | sequence_share/ | which tokens of a long sequence a rank holds, and a model that works on them |
| 1 | context_parallel/ | ring attention, Ulysses |
| 1 | flat/ | parameters in flat buckets, and ranges of them |
| 1 | guards/ | who trains a parameter, what is refused, what ranks must agree on |

docs/architecture.md follows a step of each strategy, says where to find what ("Where to find it"), and how to
add a strategy, a schedule or a recomputation policy ("How to add").
"""
