"""Strategies: how several ranks train one model to the weights that one process would have reached.

| File | Holds |
|---|---|
| contract/layout.py | `Layout`: how many ranks do what |
| engine/prepare.py | `prepare`: from model, optimizer and layout to an engine |
| contract/engine.py, engine/training_step.py | `Engine`: what `prepare` returns; a step: the mean over rows,
in no message more |
| engine/partition_model.py, engine/parameter_placement.py | the part of a model that a rank has; where it
lies in the whole |
| engine/step_executor.py | forward and backward passes of a step: through all layers, or through a pipeline |
| contract/strategy.py, contract/training_state.py | `Strategy`: what an engine asks of one; state by the
names of parameters |
| sharding/data_parallel.py | `DataParallel`: each rank computes on its share of the batch; gradients are
averaged |
| sharding/data_parallel_strategy.py | its `Strategy`: the whole state on every rank |
| training/precision.py, training/master_weights.py | bf16 and fp16: what is converted, the loss's scale;
float32 masters |
| training/clipping.py | `clip_grad_norm`: gradients shortened by their norm over all ranks |
| training/recompute.py, training/activation_memory.py | activations computed again in backward; a count of
those that are kept |
| context/ring_attention.py, context/sequence_share.py | `ring_attention`, a sequence cut across ranks; a
model on a share |
| context/arguments.py | what ring attention takes, on one rank and on all together |
| context/zigzag_order.py, context/blockwise_attention.py | the order that balances causal work; softmax block
by block, and its gradient |
| flat/buckets.py, sharding/bucket_assignment.py, sharding/reducer.py | many gradients in one message; which;
sent while backward still runs |
| averaging/local_sgd.py | `LocalSGD`: ranks train alone, and average their parameters every few steps |
| pipeline/layer_by_layer.py | `LayerByLayer`: the layers cut over the ranks, one batch at a time; where to
cut |
| pipeline/schedules.py | pipeline schedules as data: made here, of what pipeline/instructions.py has |
| pipeline/schedule_proof.py, pipeline/simulation.py, pipeline/schedule_plot.py | proved, simulated and drawn
without a process |
| pipeline/execution.py, pipeline/stage_passes.py | `Pipeline`: executes a schedule; micro-batches flow
through the stages |
| pipeline/stage_messages.py, pipeline/send_completion.py | what goes between stages; when it is known to have
arrived |
| pipeline/split_backward.py, pipeline/tied_parameters.py | a backward pass in two parts; a parameter that two
stages share |
| compression/sparse_gradients.py | sparse gradients: rows are gathered |
| compression/by_name.py, compression/top_k.py, compression/power_sgd.py | fewer bytes: rounded, the
largest only, two thin factors |
| tensor/parallelize.py | `parallelize`: a model whose matrices ranks share, by a plan that names them |
| tensor/styles.py, tensor/plans.py | a plan read and checked; plans for a GPT and an MLP, and their bytes |
| tensor/operators.py | the pairs of operators between what all ranks compute and what they share |
| tensor/column_parallel.py | layers cut by their outputs; several of one input as
one |
| tensor/row_parallel.py | layers cut by their inputs |
| tensor/vocabulary.py | a table of tokens cut by rows; a cross entropy that never sees all logits |
| tensor/cuts.py | where a tensor is cut; a part of a whole layer |
| tensor/sequence_parallel.py, training/random_state.py | norms and dropout on a share of the sequence; what
dropout draws |
| debugging/compare.py, debugging/recording.py, debugging/assembling.py | `compare`: the first layer at which
two layouts part |
| debugging/in_sync.py | `assert_in_sync`: the ranks' copies of a model are the same, or the first difference
is named |
| averaging/parameter_server.py | servers hold the parameters; workers pull and push, and need not wait for
each other |
| averaging/server.py, averaging/staleness.py, averaging/parameter_assignment.py | what a server does; when it
updates; what it holds |

To add a strategy, write its file with a `Strategy`, and let `prepare` pick it. It talks through
`minidist.comm` alone, imports no other strategy, and is held to the contract in `tests/helpers/contract.py`:
in float64 every parameter equals single-process training.
"""
