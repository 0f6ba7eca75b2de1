"""The training ladder: every strategy on one page, for readers who know PyTorch and nothing else.

Each rung is complete and adds one idea. All train the same small GPT (`gpt.py`) with the same function,
`train(model, batches, make_optimizer)`, and reach the losses and weights of one process. Every rank passes
the same model and the same global batches, and the rung takes this rank's share. Read in this order:

| Rung | The one idea | File |
|---|---|---|
| one process | the loop that all others must equal | one_process.py |
| data parallel | each rank takes its rows; one all-reduce for each gradient | data_parallel.py |
| buckets | many gradients in one message | buckets.py |
| overlap | send while backward still runs | overlap.py |
| sharded | what stays whole is a table: data parallelism and ZeRO 1, 2, 3 | sharded.py |
| parameter server | workers do not wait for each other | parameter_server.py |
| local SGD | ranks train alone, and average now and then | local_sgd.py |
| layer by layer | each rank holds some of the layers | layer_by_layer.py |
| pipeline | micro-batches let the ranks work at the same time | pipeline.py |
| tensor parallel | ranks share each matrix | tensor_parallel.py |
| sequence parallel | what is left is shared along the tokens | sequence_parallel.py |
| ring attention | a row too long for one rank | ring_attention.py |
| experts | each rank holds some experts; tokens travel to them | experts.py |
"""

LADDER = (
    "one_process",
    "data_parallel",
    "buckets",
    "overlap",
    "sharded",
    "parameter_server",
    "local_sgd",
    "layer_by_layer",
    "pipeline",
    "tensor_parallel",
    "sequence_parallel",
    "ring_attention",
    "experts",
)
"""The rungs' module names, in the order of reading."""
