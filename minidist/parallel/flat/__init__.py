"""Many parameters in one flat tensor, so that a few large messages replace many small ones.

Everything that shares gradients or parameters over ranks builds on these files.

| File | Holds |
|---|---|
| bucket_layout.py | where parameters lie in a bucket, and which part of it each rank owns |
| buckets.py | `Bucket`: values, gradients and shares of them; `GradientComm`: the ranks that have these |
| freed.py | parameters whose values are with other ranks now, and that say so when they are read |
| gathering.py | bytes of tensors, and of other values, from all ranks |
| joined_messages.py | many tensors in flat messages; `exchange`: pieces to their owners |
| ranges.py | a range of a flat tensor as boxes of the tensors in it, for checkpoints |
"""
