"""Strategies: how several ranks train one model to the weights that one process would have reached.

| File | Holds |
|---|---|
| layout.py | `Layout`: how many ranks do what |
| prepare.py | `prepare`: from model, optimizer and layout to an engine |
| engine.py, hybrid.py | `Engine`: what `prepare` returns; a step: the mean over rows, in no message more |
| rank_model.py, placement.py | the part of a model that a rank has; where it lies in the whole |
| passes.py | forward and backward passes of a step: through all layers, or through a pipeline |
| strategy.py, training_state.py | `Strategy`: what an engine asks of one; state by the names of parameters |
| data_parallel.py | `DataParallel`: each rank computes on its share of the batch; gradients are averaged |
| replicated.py | its `Strategy`: the whole state on every rank |
| precision.py, master_weights.py | bf16 and fp16: what is converted, the loss's scale; float32 masters |
| clipping.py | `clip_grad_norm`: gradients shortened by their norm over all ranks |
| recompute.py, activations.py | activations computed again in backward; a count of those that are kept |
| context_parallel.py, sequence_share.py | `ring_attention`, a sequence cut across ranks; a model on a share |
| ring_arguments.py | what ring attention takes, on one rank and on all together |
| zigzag.py, blockwise.py | the order that balances causal work; softmax block by block, and its gradient |
| buckets.py, plan.py, reducer.py | many gradients in one message; which; sent while backward still runs |
| local_sgd.py | `LocalSGD`: ranks train alone, and average their parameters every few steps |
| layerwise.py | `LayerByLayer`: the layers cut over the ranks, one batch at a time; where to cut |
| schedules.py | pipeline schedules as data: made here, of what instructions.py has |
| schedule_checks.py, simulation.py, schedule_plot.py | proved, simulated and drawn without a process |
| pipeline.py, stage_passes.py | `Pipeline`: executes a schedule; micro-batches flow through the stages |
| stage_messages.py, receipts.py | what goes between stages; when it is known to have arrived |
| split_backward.py, tied.py | a backward pass in two parts; a parameter that two stages share |
| sparse.py | sparse gradients: rows are gathered |
| compression.py, top_k.py, power_sgd.py | fewer bytes: rounded, the largest only, two thin factors |
| tensor_parallel.py | `parallelize`: a model whose matrices ranks share, by a plan that names them |
| tensor_styles.py, tensor_plans.py | a plan read and checked; plans for a GPT and an MLP, and their bytes |
| tensor_operators.py | the pairs of operators between what all ranks compute and what they share |
| column_parallel.py, column_function.py | layers cut by their outputs; several of one input as one |
| row_parallel.py, whole_layers.py | layers cut by their inputs; what is cut |
| vocabulary.py | a table of tokens cut by rows; a cross entropy that never sees all logits |
| tensor_cuts.py, tensor_exchange.py | where a tensor is cut; collectives along any dimension |
| sequence_parts.py, random_state.py | norms and dropout on a share of the sequence; what dropout draws |
| compare.py, recording.py, assembling.py | `compare`: the first layer at which two layouts part |
| in_sync.py | `assert_in_sync`: the ranks' copies of a model are the same, or the first difference is named |
| parameter_server.py | servers hold the parameters; workers pull and push, and need not wait for each other |
| serving.py, staleness.py, server_parts.py | what a server does; when it updates; what it holds |

To add a strategy, write its file with a `Strategy`, and let `prepare` pick it. It talks through
`minidist.comm` alone, imports no other strategy, and is held to the contract in `tests/contract.py`: in
float64 every parameter equals single-process training.
"""
