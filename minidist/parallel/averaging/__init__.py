"""Strategies whose ranks do not combine gradients in every step: local SGD and the parameter server.

Both are for a loop that the user writes; they trade exact equality with one process for less waiting.

| File | Holds |
|---|---|
| local_sgd.py | `LocalSGD`: ranks train alone, and average their parameters every few steps |
| parameter_server.py | `ParameterServer`: what workers call, and `bytes_per_step` |
| server.py | what a server does: read requests, make updates, answer |
| staleness.py | the rule that says which pushes go into the next update |
| parameter_assignment.py | which server holds which parameters, and their messages |
"""
