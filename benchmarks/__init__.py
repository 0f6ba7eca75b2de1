"""The benchmarks: pytest-benchmark suites, what they leave behind, and the report that is made of it.

`minidist bench` runs every bench_*.py here and keeps one JSON a machine; `minidist report` shows it. A new
suite is one more bench_*.py: whatever it puts into `benchmark.extra_info` under a name that
`harness/columns.py` knows gets a column in the report, and nothing else has to change.
"""
