"""Context parallelism: each rank holds a share of a sequence that is too long for one rank.

Start with `apply` in sequence_share.py, which makes a model work on its share; `ring_attention` is the one
layer in which ranks need each other's data.

| File | Holds |
|---|---|
| ring_attention.py | `ring_attention`: keys and values travel around a ring of ranks; `ring_bytes` |
| ulysses.py | `ulysses_attention`: ranks trade tokens for heads, and back |
| sequence_share.py | `SequenceShare`: cuts sequences and puts them together; `apply`: a model on its share |
| transformers_models.py | the same for models of transformers: ring attention by the name in their config |
| zigzag_order.py | which positions a rank holds, so that causal attention is balanced |
| blockwise_attention.py | softmax over one block of keys after another, and its gradient |
"""
