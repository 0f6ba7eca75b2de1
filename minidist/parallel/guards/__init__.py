"""Checks that every strategy shares: they refuse a mistake before it trains a model wrongly.

| File | Holds |
|---|---|
| claims.py | `claim`: which object trains a parameter: one at a time |
| refusals.py | models, batches and optimizers that cannot train; arguments that differ between ranks |
"""
