"""The machinery behind the `bench_*.py` suites: it runs programs, times them and keeps the results.

A comparison never rests on two separate runs. The harness runs our program and its peer in turns, so that
both see the same machine.

Running and timing:
    run_suites             runs the suites with pytest and merges what they measured into the results file
    progress               pytest plugin: one line for each finished benchmark, and a progress bar
    collective_timing      collectives and torch's, and the fit of the cost model, inside the ranks
    turns                  two programs in turns inside one benchmark, and their ratio
    cuda_smoke             checks one rung of the CUDA ladder on small and ragged products, by hand
    cuda_tune              times a rung with other values of its constants, by hand
Results:
    results                one machine's JSON file: format, loading, merging, saving
    describe_machine       CPU, GPUs, caches and software versions; which machines are the same
    columns                which figures a benchmark may store, and how the report prints them
    formats                numbers as the report prints them
    compare_runs           `--compare`: what got slower since an earlier run
The measured programs, a folder for each kind of measurement:
    cuda/                  the CUDA ladder
    training/              training steps: the table of strategies, other libraries, the training ladder
    slow_link/             two hosts with a slow link between them
"""
