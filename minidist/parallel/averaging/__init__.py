"""Strategies whose ranks do not combine gradients in every step: local SGD, DiLoCo, the parameter server.

Both are for a loop that the user writes; they trade exact equality with one process for less waiting.

| File | Holds |
|---|---|
| local_sgd.py | `LocalSGD`: when a worker that trains alone synchronizes which part of the model |
| exchanges.py | how: an all-reduce and an outer step on every rank, or through a coordinator |
| coordinator.py | `Coordinator`: makes the outer steps of workers that come and go |
| parameter_server.py | `ParameterServer`: what workers call |
| serving.py | what a server does: read requests, make updates, answer |
| staleness.py | the rule that says which pushes go into the next update, or outer step |
| parameter_assignment.py | which server or fragment has which parameters, and their messages |
"""
