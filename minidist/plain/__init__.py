"""The training ladder: every strategy on one page, for readers who know PyTorch and nothing else.

Each rung is complete and adds one idea. All train the same small GPT (`gpt.py`) with the same function,
`train(model, batches, make_optimizer)`. Every rank passes the same global batches, and the rung takes this
rank's share. All ranks start from rank 0's weights (`gpt.same_weights`), and end with the whole model, as one
process leaves it. Losses and weights are those of one process, but for the parameter server and local SGD,
which trade that for less waiting, and low precision, which rounds. Two parts are no rungs: mistakes/ plants
mistakes in rungs, and placements.py is a checker, which finds some without ranks. Read in this order:

| Rung | The one idea | File |
|---|---|---|
| one process | the loop that all others must equal | one_process.py |
| data parallel | each rank takes its rows; one all-reduce for each gradient | data_parallel.py |
| buckets | many gradients in one message | buckets.py |
| overlap | send while backward still runs | overlap.py |
| sharded | what stays whole is a table: data parallelism and ZeRO 1, 2, 3 | sharded.py |
| Muon | whole matrices dealt to owners, which make their updates orthogonal | muon.py |
| parameter server | workers do not wait for each other | parameter_server.py |
| local SGD | ranks train alone, and average now and then | local_sgd.py |
| layer by layer | each rank holds some of the layers | layer_by_layer.py |
| pipeline | micro-batches let the ranks work at the same time | pipeline.py |
| tensor parallel | ranks share each matrix | tensor_parallel.py |
| sequence parallel | what is left is shared along the tokens | sequence_parallel.py |
| ring attention | a row too long for one rank | ring_attention.py |
| Ulysses | ranks trade tokens for heads, and back | ulysses.py |
| experts | each rank holds some experts; tokens travel to them | experts.py |
| low precision | multiply numbers of 8 bits, and scale them first | low_precision.py |

A rank is one of n processes, each with its own memory. Ranks share nothing but what they send through
`minidist.comm`. The calls in which all of them take part, and the bytes each rank sends for a tensor of S:

    broadcast       every rank gets rank 0's tensor               rank 0 sends S to each other rank
    all_reduce      every rank gets the sum of all tensors        2 (n - 1) / n S: the next two together
    reduce_scatter  rank r gets the r-th part of the sum          (n - 1) / n S
    all_gather      every rank gets the parts of all ranks        (n - 1) / n S, if all parts together have S
    all_to_all      rank r gets the r-th part of every tensor     (n - 1) / n S

`send` and `recv` pass a tensor from one rank to another. With `async_op=True` a call returns at once, and its
`wait()` returns the result. A rung's formula is for one step. What it sends once, weights and losses, comes
on top. To run a rung on 4 ranks, and print the losses that rank 0 has seen:

    import functools, minidist, torch
    from minidist.plain import data_parallel, gpt

    tokens = torch.arange(8 * 13).view(8, 13) % 64
    batches = [(tokens[:, :-1], tokens[:, 1:])] * 20
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    print(minidist.launch(lambda: data_parallel.train(gpt.gpt(), batches, adamw), ranks=4)[0])
"""

LADDER = (
    *("one_process", "data_parallel", "buckets", "overlap", "sharded", "muon", "parameter_server"),
    *("local_sgd", "layer_by_layer", "pipeline", "tensor_parallel", "sequence_parallel", "ring_attention"),
    *("ulysses", "experts", "low_precision"),
)
"""The rungs' module names, in the order of reading."""
