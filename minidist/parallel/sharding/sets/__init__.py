"""Parameters that are shared in one way: which they are, and which ranks average and share them.

| File | Holds |
|---|---|
| parameter_set.py | `ParameterSet`: parameters, their ranks, and the rounds of their gradients |
| equal_start.py | `start_equal`: ranks begin with the same values |
"""
