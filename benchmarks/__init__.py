"""The benchmarks: pytest-benchmark suites, the results that they write, and the report made from them.

`minidist bench` runs every bench_*.py in this folder and keeps one JSON file a machine; `minidist report`
shows it. To add a suite, add a bench_*.py. If it has a function `measured`, its benchmarks ask the fixture
`timed` for what that returns. Whatever it puts into `benchmark.extra_info` under a name that
`harness/columns.py` knows becomes a column of the report; nothing else has to change.

`harness/` holds what suites share: programs timed in turns, peers, the machine, the results file. `report/`
turns results into findings, tables and figures. `results/` has one file a machine.
"""
