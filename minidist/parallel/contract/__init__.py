"""What layouts, strategies and engines promise each other: the records that all of them read.

| File | Holds |
|---|---|
| layout.py | `Layout`: how many ranks do what |
| residency.py | what every rank keeps whole with data parallelism and each stage of ZeRO: the table |
| schedule_kinds.py | what is true of each pipeline schedule, in one record |
| fp8_recipes.py | which numbers share a scale in FP8, by the name of a precision |
| recompute_policies.py | which parts of a model are recomputed, by the name of a policy |
| user_functions.py | the functions that a caller gives: a loss, one that makes an optimizer |
| kept_attributes.py | put modules and functions back as a call found them |
| batch.py | tensors in any structure, by rows |
| tensor_boxes.py | `TensorBox`: a part of a tensor of the training state, as a rank holds it |
| training_state.py | an optimizer's state by parameter names |
| memory_report.py | `Memory`: bytes by purpose; which storages count |
"""
