"""Many parameters in one flat tensor, so that a few large messages replace many small ones.

Everything that shares gradients or parameters over ranks builds on these files.

| File | Holds |
|---|---|
| buckets.py | `Bucket`: gradients in one flat tensor; `GradientComm`: the ranks that sum them; broadcasts |
| flat_parameter.py | `FlatParameter`: parameters in one tensor; gathered for a pass, else 1/n on each rank |
| reassigned_data.py | the refusal of `parameter.data = tensor` for parameters in flat memory |
| ranges.py | a range of a flat tensor as boxes of the tensors in it, for checkpoints |
"""
