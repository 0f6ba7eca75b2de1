"""Memory of training on each rank, estimated from a model's shape and a layout.

`estimate` predicts the bytes, `fits` finds the largest batch in a budget, `plot` draws them.
`python -m minidist.scale.memory` prints a table of what fits. None of them needs torch.

| File | Holds |
|---|---|
| parameter_sizes.py | elements of each parameter on a rank |
| state_bytes.py | bytes of parameters, gradients and optimizer state |
| saved_activations.py | bytes that the forward pass saves |
| training_setup.py | layout, batch, precision and optimizer together; checks of what is asked |
| estimates.py | `estimate`: all of these, on the rank with the most bytes |
| largest_batch.py | `fits`: the largest batch in each layout, and the first layout that fits |
| bar_chart.py | `plot` |
| __main__.py | the command |
"""

from minidist.parallel.contract.memory_report import Memory as Memory
from minidist.scale.memory.bar_chart import plot as plot
from minidist.scale.memory.estimates import Estimate as Estimate
from minidist.scale.memory.estimates import estimate as estimate
from minidist.scale.memory.largest_batch import Fit as Fit
from minidist.scale.memory.largest_batch import fits as fits
