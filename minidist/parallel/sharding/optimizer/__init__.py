"""The optimizer's step: which elements does this rank update, and where does their state lie?

| File | Holds |
|---|---|
| optimizer_slices.py | `OptimizerSlices`: this rank's part of the optimizer's step, masters and state |
| whole_on_owners.py | `WholeOnOwners`: those that the optimizer needs whole, on an owner each |
| parameter_groups.py | `FlatParameterGroups`: the optimizer's groups over flat shards |
| memory_source.py | `memory_source`: where shards, masters and state lie: device, CPU memory or files |
"""
