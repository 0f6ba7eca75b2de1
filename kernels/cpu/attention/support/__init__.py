"""The parts that rungs 4 to 7 of the attention ladder build on.

| File | Holds |
|---|---|
| vector_softmax | rows of a softmax in whole vectors: largest, powers of 2 and their sum |
| forward_pass, backward_pass | attention by blocks of keys, in register tiles |
| parts, sizes | parts of attention that threads take, and how large their blocks are |
"""
