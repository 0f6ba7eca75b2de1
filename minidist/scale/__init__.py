"""What training costs at a scale, reckoned before anything is built; and where the time of a step goes.

| File | Holds |
|---|---|
| memory.py | `estimate`, `fits` and `plot`; `python -m minidist.scale.memory` prints what fits |
| estimates.py | the bytes of a layout on each rank |
| states.py | parameters, gradients and optimizer state |
| tensors.py | the sizes of a model's parameters, layer by layer |
| saved.py | what the forward pass saves for the backward pass |
| fitting.py | the largest batch that fits, and what makes it fit |
| memory_plot.py | the bar chart |
| trace.py | `trace`: what every rank does in a step, as a file for Perfetto and as a picture |
"""
