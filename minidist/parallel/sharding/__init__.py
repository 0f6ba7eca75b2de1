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

An engine has one strategy for all of them, a `Sharded`, which is plain data parallelism too: in the first row
only sums of gradients are shared. The classes of the last column are for people's own loops. A model has one
set of parameters, or several, such as experts: each with its ranks (`ParameterSet`). A bucket's gradients are
complete when the last of them has arrived (`Reducer`) or, where parameters are not whole, when the backward
pass has left a unit of the model (`UnitRuntime`). Then they are reduced (../flat/gradients.py), the optimizer
updates this rank's slices (`OptimizerSlices.update`), and the shares are published (../flat/values.py). With
hybrid sharding n is the size of a group, and each share has an owner in every group (`GradientComm.hybrid`).

Where memory is given back:

- ZeRO 1 and above give the optimizer only this rank's slices of the buckets: `OptimizerSlices.add`.
- ZeRO 2 and above let go of gradients that this rank does not own: `GradientsInLentMemory.give_back`.
- ZeRO 3 also lets go of whole parameters after a unit's pass: `GatheredValues.free`.

| Where | The question it answers |
|---|---|
| ../contract/residency.py | who keeps what whole? The table, and what follows from a row |
| share_model.py | `share_model`: which strategy trains a model? |
| sharded.py | `Sharded`, the base of whole/ and units/: what does every row do in a step? |
| state_by_name.py | `state_boxes`, `settings`: what does a checkpoint save of this rank? |
| sets/ | which parameters are shared in one way, and by which ranks? |
| whole/ | parameters are whole: when is a bucket of gradients sent? |
| units/ | parameters are not whole: when is a unit gathered, reduced and freed? |
| optimizer/ | which elements does this rank update, and where does their state lie? |
| loops/ | the classes for a loop of your own |
"""
