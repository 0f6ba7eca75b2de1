"""Gradient compression: fewer bytes for a bucket's gradients, which arrive rounded or late.

To add a compression, write a `Compression` and its `Reduction`, and name it in by_name.py.

| File | Holds |
|---|---|
| by_name.py | the compressions by name; `compression_of` |
| compressor.py | the interface, `Compression` and `Reduction`; no compression; `Cast` to 16 bits |
| top_k.py | `TopK`: the largest elements and their indices |
| power_sgd.py | `PowerSGD`: two thin factors of each matrix |
| sparse_gradients.py | sparse gradients: only the rows that a batch used |
"""
