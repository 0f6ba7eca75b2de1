"""The steps that a suite times inside its ranks: ours in turns with torch's.

training_steps         our engine, and plain torch or DDP
sharded_steps          ZeRO, and torch's sharded loops
tensor_steps           tensor parallelism, and torch's `parallelize_module`
pipeline_steps         our schedules, and `torch.distributed.pipelining`
collective_timing      collectives and torch's, and the fit of the cost model
"""
