"""The machinery behind the `bench_*.py` suites: it runs programs, times them and keeps the results.

A comparison never rests on two separate runs. The harness runs our program and its peer in turns, so that
both see the same machine.

Running and results:
    run                    runs the suites with pytest and merges what they measured into the results file
    one_rung               gives each rung of the CUDA ladder a process of its own, with a time limit
    compile_ladder         compiles the CUDA ladder on all cores before it is measured
    progress               pytest plugin: one line for each finished benchmark, and a progress bar
    results                one machine's JSON file: format, loading, merging, saving
    columns                which figures a benchmark may store, and how the report prints them
    formats                numbers as the report prints them
    compare_runs           `--compare`: what got slower since an earlier run
    machine                CPU, GPUs, caches and software versions
    identity               whether two descriptions are of the same machine
Timing:
    turns                  two programs in turns inside one benchmark, and their ratio
    cuda_timing            the same on a GPU: operands, rounds, the GPU's clock
    cuda_smoke             checks one rung of the CUDA ladder on small and ragged products
    cuda_check             checks a GPU's product against float64
Training steps, run inside the ranks:
    training_steps         our engine and plain torch or DDP
    sharded_steps          ZeRO and torch's sharded loops
    tensor_steps           tensor parallelism and torch's `parallelize_module`
    pipeline_steps         our schedules and `torch.distributed.pipelining`
    collective_timing      collectives and torch's, and the fit of the cost model
The table of strategies:
    strategies             its rows and their peers, as data
    strategy_rounds        measures a family of rows in rounds
    strategy_steps         what a rank does in a round
    strategy_loops         strategies that need a loop of their own
    programs               a training loop that is timed and whose memory is counted
    peers                  the loops of other libraries
    peers_model_parallel   torch's tensor parallelism and pipelines
    peer_packages          Accelerate and DeepSpeed
The training ladder:
    plain_ladder           its rungs, and which engine's form belongs to each, as data
    plain_forms            the engine's forms, for the ladder's GPT
    plain_steps            runs a rung as it stands, times its steps and counts its memory
The slow link:
    two_hosts              two hosts on one machine, made of Linux namespaces
    slow_wire              the wire between them, with a rate and a delay
    slow_link_steps        the training program that runs on both hosts
"""
