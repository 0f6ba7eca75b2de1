"""Expert parallelism: each rank holds some of a block's experts, and tokens travel to them.

Start with `share_experts` in expert_parallel.py, which makes a model work on the rank's own experts.

| File | Holds |
|---|---|
| expert_parallel.py | `share_experts`: a model with the rank's own experts; the all-to-alls of a layer |
| load_balance.py | `balance_experts`: moves the routers' biases after a step |
| replica_advice.py | `place_experts`: which experts to hold more than once, where the load is not even |
"""
