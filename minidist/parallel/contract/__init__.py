"""The contract between the engine and the strategies, and the records that all of them read.

| File | Holds |
|---|---|
| layout.py | `Layout`: how many ranks do what |
| schedule_kinds.py | what is true of each pipeline schedule, in one record |
| recompute_policies.py | which parts of a model are recomputed, by the name of a policy |
| engine.py | what a caller gives an engine: loss, optimizer, batches; evaluation mode for a while |
| batch.py | tensors in any structure, by rows |
| strategy.py | `Strategy`: what an engine asks of the data-parallel ranks; `TensorBox` |
| training_state.py | an optimizer's state by parameter names |
| memory_report.py | `Memory`: bytes by purpose; which storages count |
"""
