"""Many parameters in one flat tensor, so that a few large messages replace many small ones.

Everything that shares gradients or parameters over ranks builds on these files.

| File | Holds |
|---|---|
| bucket_layout.py | where parameters lie in a bucket, and which part of it each rank owns |
| buckets.py | `Bucket`: what is sent as one; it has gradients, and values where ranks own shares |
| gradients.py | how gradients get to all ranks, or to their owners; `GradientComm`: which ranks these are |
| values.py | where values are whole, or a share, and how all ranks get the shares |
| freed.py | parameters whose values are with other ranks now, and that say so when they are read |
| gathering.py | bytes of tensors, and of other values, from all ranks |
| joined_messages.py | many tensors in flat messages; `exchange`: pieces to their owners |
| ranges.py | a range of a flat tensor as boxes of the tensors in it, for checkpoints |
"""
