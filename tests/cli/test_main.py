"""The command: fast help, errors in one line, exit codes, and what each command does."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import minidist as md
from minidist import benchmarks, cli
from minidist.benchmarks.harness import results
from minidist.cli import commands, train
from minidist.comm.errors import RankCountError, RankError
from tests.helpers import measured, warm_python
from tests.helpers.clocks import HANG, until
from tests.helpers.fresh_python import output_of

COMMAND = [sys.executable, "-c", "from minidist.cli.commands import main; main()"]


def one_line(err):
    assert err.startswith("minidist: ")
    assert err.count("\n") == 1
    return err


def in_a_terminal(command, **more):
    """Run a command whose stderr is a terminal; return its exit code and what the terminal got."""
    ours, terminal = os.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = warm_python.Popen(command, stderr=terminal, stdout=subprocess.PIPE, env=variables, **more)
    os.close(terminal)
    told = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while read := os.read(ours, 4096):
            told += read
    os.close(ours)
    process.communicate(timeout=HANG)
    return process.returncode, told.decode()


PLAN = ["plan", "--model=gpt2-small", "--ranks=2", "--profile=h100"]


@pytest.mark.parametrize("words", [["--help"], PLAN], ids=["help", "plan"])
def test_help_and_a_plan_import_nothing_heavy(words):
    program = (
        f"import sys\nfrom minidist.cli import main\ntry:\n    main({words})\nexcept SystemExit as end:\n"
        "    heavy = {'torch', 'numpy', 'numba', 'matplotlib', 'pytest', 'sklearn'} & set(sys.modules)\n"
        "    sys.exit(end.code or sorted(heavy) or 0)"
    )
    out = output_of(program)
    told = ("train", "compare", "bench", "report", "plan", "lessons", "doctor")
    assert all(name in out for name in told) or words is PLAN


COMMANDS = "train compare trace bench report plan dryrun mistakes judge lessons doctor"


@pytest.mark.parametrize("command", COMMANDS.split())
def test_help_of_a_command_has_an_example_and_whole_sentences(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"minidist {command}" in out.partition("Example:")[2]
    assert "--json" in out
    words = [line.strip() for line in re.split("╭", out)[0].splitlines() if line.strip()][1:]
    for line in words:  # planted: a docstring's line ends in the middle of a terminal's line
        assert line.endswith((".", ":", "FOLDER")), line


def test_optimizers_have_the_same_names_in_all_commands(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for command in ("train", "trace", "plan", "dryrun"):
        assert "adamw, adam, muon, momentum (SGD with momentum) or sgd." in run(command, "--help")[1]
    plans = ("plan", "--model", "byte-tiny", "--memory", "1GB", "--ranks", "2", "--json", "--optimizer")
    assert run(*plans, "adamw") == run(*plans, "adam")
    assert run(*plans, "momentum") != run(*plans, "sgd")


def test_a_dry_runs_table_has_the_layouts_own_names(run):
    words = ("dryrun", "--model", "byte-tiny", "--layout", "dp=2,tp=2,pp=2,micro_batches=2")
    axes = {line.split()[0] for line in run(*words)[1].splitlines() if "float32" in line}
    assert axes <= {"dp", "tp", "pp", "all"}
    assert {"dp", "tp", "pp"} <= axes


def test_no_words_are_a_call_for_help(run):
    code, out, _ = run()
    assert code == 0
    assert "Usage" in out


def test_the_version_is_the_packages(run):
    assert run("--version") == (0, f"minidist {md.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "'train'"),
        (["train", "--stpes", "3"], "--steps"),
        (["train", "--steps", "many"], "--steps"),
        (["train", "--ranks", "0"], "--ranks"),
        (["train", "--data", "bytes", "--model", "byte-tinny"], "'byte-tiny'"),
        (["train", "--layout", "dq=2"], "'dp'"),
        (["train", "--ranks", "2", "--layout", "dp=4"], "needs 4 ranks and --ranks is 2"),
        (["train", "--ranks", "100"], "100 data-parallel ranks"),
        (["train", "--layout", "pp=2,zero=2"], "zero=2 with pp=2 in the layout would send gradients once"),
        (["train", "--layout", "tp=2,cp=0"], "cp is 0; give at least 1"),
        (["train", "--layout", "cp=2"], "cp is 2 in the layout, and the mlp has no attention; leave it out"),
        (["train", "--batch", "1438"], "batch is 1438, and digits has 1437 rows; give at most so many"),
        (["compare", "--a", "dp=1"], "--b"),
        (["compare", "--a", "dp=1", "--b", "dq=2"], "'dp'"),
        (["compare", "--a", "dp=1", "--b", "dp=2", "--model", "byte-tinny"], "'byte-tiny'"),
        (["compare", "--a", "dp=1", "--b", "dp=9"], "9 data-parallel ranks"),
        (["bench", "lunch"], "'launch'"),
        (["report", "--results", "/no/such/folder"], "minidist bench"),
        (["doctor", "--jsn"], "--json"),
        (["train", "--ranks=0"], "greater than or equal to 1, and it is 0 (minidist train --help)"),
        (["plan", "--model", "gpt2-xl", "--precision", "fp8"], "saves no time on any machine"),
    ],
)
def test_bad_input_is_one_line_that_helps(run, words, told):
    code, out, err = run(*words)
    assert code == 2
    assert told in one_line(err)
    assert out == ""


def test_a_rank_that_fails_is_one_line_and_with_debug_its_traceback(run, monkeypatch):
    error = RankError("rank 1 failed:\nValueError: no", rank=1, traceback="Traceback of rank 1\n  line 7")
    monkeypatch.setattr(train, "run", Mock(side_effect=error))
    code, _, err = run("train")
    assert code == 1
    assert one_line(err) == "minidist: rank 1 failed: ValueError: no\n"
    code, _, err = run("train", "--debug")
    assert code == 1
    assert "Traceback of rank 1\n  line 7" in err
    assert "minidist: rank 1 failed" in err


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (ModuleNotFoundError("pip install it"), 2, "pip install it"),
        (PermissionError(13, "Permission denied", "some/file"), 1, "some/file: Permission denied"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero (--debug shows where)"),
    ],
)
def test_what_goes_wrong_underway(run, monkeypatch, error, code, told):
    monkeypatch.setattr(train, "run", Mock(side_effect=error))
    found, _, err = run("train")
    assert found == code
    assert told in one_line(err)


def test_train_prints_json_and_nothing_else(run):
    words = ("train", "--ranks", "2", "--steps", "12", "--batch", "60", "--rung", "s2_vectors", "--json")
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert len(found["losses"]) == 12
    assert found["losses"][-1] < found["losses"][0]
    assert found["config"]["layout"]["dp"] == 2
    assert found["config"]["rung"] == "s2_vectors"
    assert found["bytes_sent"] > 0


def test_train_says_what_it_learned(run):
    code, out, _ = run("train", "--steps", "3")
    assert code == 0
    assert re.search(r"mlp on digits, 9,610 parameters.*3 steps", out)
    assert "accuracy" in out


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (0, "3 steps in 2.0 s, 5 rows/s\n"),
        (2, "1 steps in 2.0 s, 5 rows/s, continued from step 2, saved in some/folder\n"),
        (3, "the run in some/folder has all 3 steps already\n"),
    ],
)
def test_train_says_where_it_went_on(run, monkeypatch, before, told):
    result = train.TrainResult([1.0, 0.5, 0.25], 0.3, 0.9, 10, 2.0, 5.0, 0, resumed_at=before)
    monkeypatch.setattr(train, "run", lambda *_, **__: result)
    words = ("train", "--steps", "3", "--save", "some/folder")
    assert run(*words)[:2] == (
        0,
        f"mlp on digits, 10 parameters, layout {md.Layout()}: {told}"  # not broken in a pipe
        "loss 1.0000 -> 0.2500; held out: loss 0.3000, accuracy 90.0%; sent by a rank: 0 bytes\n",
    )
    assert json.loads(run(*words, "--json")[1])["resumed_at"] == before


def test_a_training_that_diverges_fails(run):
    code, out, err = run("train", "--steps", "5", "--lr", "1e30", "--json")
    assert code == 1
    assert "the training diverged" in one_line(err)
    assert json.loads(out)["losses"][-1] is None  # JSON has no NaN


def test_a_batch_larger_than_the_bytes_is_refused(run):
    code, _, err = run("train", "--data", "bytes", "--batch", "1" + "0" * 9)
    assert code == 1
    assert "batch is 1000000000, and bytes has" in one_line(err)


def test_under_torchrun_rank_0_speaks_for_all(run, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    code, out, _ = run("train", "--steps", "1")  # a variable that was left in a shell
    assert (code, bool(out)) == (0, True)
    out_file = tmp_path / "trace.json"
    traced = ("trace", "--layout", "dp=1", "--steps", "1", "--out", str(out_file))
    assert run(*traced)[0] == 0
    assert out_file.exists()

    found = train.run(train.TrainConfig(steps=1))
    monkeypatch.setattr(train, "run", lambda *given, **options: found)
    monkeypatch.setattr(train, "trace_layout", lambda *given, **options: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert run("train", "--steps", "1")[:2] == (0, "")
    assert run(*traced)[:2] == (0, "")


@pytest.mark.parametrize(("rank", "says"), [("0", "started 2 ranks"), ("1", "")])
def test_a_wrong_number_of_ranks_is_said_once(run, monkeypatch, rank, says):
    error = RankCountError("torchrun started 2 ranks and the program asks for 4; make them equal")
    monkeypatch.setattr(train, "run", Mock(side_effect=error))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("RANK", rank)
    code, out, err = run("train", "--layout", "dp=4", "--steps", "1")
    assert (code, out, bool(err)) == (2, "", bool(says))
    assert says in err


def test_ctrl_c_ends_a_training_with_one_line():
    program = "from minidist.cli.commands import main; print('begins', flush=True); main()"
    words = ["train", "--data", "bytes", "--steps", "1000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = warm_python.Popen([sys.executable, "-c", program, *words], **pipes)
    assert process.stdout.readline() == "begins\n"
    time.sleep(1)  # until it trains; if it does not yet, it stops as well
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert one_line(err) == "minidist: stopped\n"


def test_ctrl_c_ends_a_command_that_still_loads_with_one_line(tmp_path):
    """Planted: a library of the command line during whose import Ctrl-C comes."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-c", "from minidist.cli import main; main()", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(md.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert one_line(done.stderr) == "minidist: stopped\n"


def test_ctrl_c_before_a_command_is_known_ends_with_one_line(monkeypatch, capsys):
    """Planted: Ctrl-C in the first lines of the command line, outside of what handles it later."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "minidist: stopped\n"


def test_train_in_a_terminal_says_at_once_what_takes_so_long():
    code, told = in_a_terminal([*COMMAND, "train", "--steps", "2", "--ranks", "2"])
    assert code == 0
    assert told.startswith("minidist: loading torch for 2 ranks; the first step is some seconds away")
    assert told.index("preparing") < told.index("2/2")
    assert re.search(r"loss \d", told)
    assert "nan" not in told


FAKE_SUITE = '''"""A suite of the tests.

More about it.
"""

import pytest
from minidist.benchmarks.harness.turns import compared, turns

def test_good(benchmark):
    benchmark.group = "things"
    benchmark.pedantic(sum, args=([1, 2],), rounds=3)
    benchmark.extra_info["label"] = "a good one"

@compared("things")
def test_turns(benchmark):
    passed = [0.0]  # seconds, of a clock that no other process can slow down
    ours, peer = (lambda: passed.append(passed[-1] + 2e-3)), (lambda: passed.append(passed[-1] + 1e-3))
    turns(benchmark, ours, peer, peer_name="half of it", rounds=5, clock=lambda: passed[-1])

def test_bad(benchmark):
    benchmark.pedantic(lambda: None)
    assert 1 == 2, "planted"

@pytest.mark.skipif(True, reason="not on this machine")
def test_left_out(benchmark):
    benchmark(lambda: None)

@pytest.mark.no_finding
def test_named(benchmark):
    benchmark.pedantic(lambda: None)

def test_helper_without_the_fixture():
    pass
'''
# Suites from another folder, in a process of its own: pytest does not run inside pytest.
BENCH = [
    sys.executable,
    "-c",
    "import sys, pathlib\nfrom minidist.benchmarks.harness import run_suites as run\n"
    "run.HERE = pathlib.Path(sys.argv.pop(1))\n"
    "from minidist.cli.commands import main\nmain()",
]


def bench(folder, *words, **variables):
    command = [*BENCH, str(folder), "bench", "--out", str(folder / "out.json"), *words]
    return warm_python.run(command, timeout=HANG, env={**os.environ, **variables}, cwd=folder)


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "bench_fake.py").write_text(FAKE_SUITE)
    shutil.copy(Path(benchmarks.__file__).with_name("conftest.py"), tmp_path)
    # Benchmarks ignore a project's own settings and plugins.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --benchmark-disable\nfilterwarnings = error\n")
    return tmp_path


def test_bench_keeps_what_it_measured(suite):
    done = bench(suite, PYTEST_ADDOPTS="--benchmark-skip --no-such-option")
    assert done.returncode == 1
    assert "1 failed: test_bad: AssertionError: planted" in done.stderr
    assert "skipped test_left_out: not on this machine" in done.stdout
    assert "a good one" in done.stderr
    assert "half of it" in done.stderr
    assert done.stderr.count("bad") == 2  # that it failed, there and at the end, but no time
    found = results.load(suite / "out.json")
    assert [entry["name"] for entry in found["benchmarks"]] == ["test_good", "test_turns"]
    assert found["suites"] == {"bench_fake": "A suite of the tests."}
    good, turned = found["benchmarks"]
    assert (good["group"], good["extra_info"], good["stats"]["rounds"]) == (
        "things",
        {"label": "a good one"},
        3,
    )
    assert "data" not in good["stats"]
    assert turned["extra_info"]["ratio"] == pytest.approx(2.0)
    assert sorted(path.name for path in suite.iterdir() if path.name != "__pycache__") == [
        "bench_fake.py",
        "conftest.py",
        "out.json",
        "pytest.ini",
    ]


def test_bench_prints_json_and_nothing_else(suite):
    done = bench(suite, "-k", "good", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["measured"], found["failed"], found["suites"]) == (1, [], ["bench_fake"])
    assert "results" not in found  # they are in the file
    assert done.stderr == ""
    assert results.load(suite / "out.json")["benchmarks"][0]["name"] == "test_good"


def test_bench_merges_a_second_run(suite):
    assert bench(suite, "-k", "good").returncode == 0
    first = "2026-01-01T00:00:00+00:00"  # runs are named by the second, and two may begin in one
    out = suite / "out.json"
    out.write_text(out.read_text().replace(results.load(out)["benchmarks"][0]["run"], first))
    assert bench(suite, "fake", "-k", "turns or named").returncode == 0
    found = results.load(suite / "out.json")
    assert [entry["name"] for entry in found["benchmarks"]] == ["test_good", "test_turns", "test_named"]
    assert len(found["runs"]) == 2
    assert found["benchmarks"][0]["run"] == first
    (suite / "bench_fake.py").write_text(FAKE_SUITE.replace("test_turns", "test_new"))
    bench(suite)  # what is left out, since it is not named, stays; what is gone goes
    found = results.load(suite / "out.json")
    assert [entry["name"] for entry in found["benchmarks"]] == ["test_named", "test_good", "test_new"]


def test_bench_beside_an_earlier_file_says_what_got_slower(run, monkeypatch, tmp_path):
    from minidist.benchmarks.harness import compare_runs
    from minidist.benchmarks.harness import run_suites as bench_run

    earlier = tmp_path / "earlier.json"
    changes = [compare_runs.Change("x", "overlap", "Forms", "slower", "ratio to torch DDP", 0.95, 1.4)]
    asked = {}

    def fake(names, *, compare, **options):
        asked["compare"] = compare
        return bench_run.Outcome(
            tmp_path / "out.json", {}, 1, 2.0, compared=compare_runs.Comparison(tuple(changes), True)
        )

    monkeypatch.setattr(bench_run, "run", fake)
    code, out, err = run("bench", "--compare", str(earlier))
    assert (code, asked["compare"]) == (1, earlier)
    assert "overlap (Forms): slower, ratio to torch DDP 0.95 -> 1.40\n" in out
    assert one_line(err).startswith("minidist: 1 slower than in ")
    code, out, _ = run("bench", "--compare", str(earlier), "--json")
    assert (code, json.loads(out)["compared"]["slower"]) == (1, 1)
    changes[:] = [compare_runs.Change("x", "overlap", "Forms", "faster", "time", 2.0, 1.0)]
    code, out, err = run("bench", "--compare", str(earlier))
    assert (code, err) == (0, "")
    assert "overlap (Forms): faster, time 2.00 s -> 1.00 s" in out


def test_bench_beside_a_file_that_is_none_says_so_before_it_measures(run, tmp_path):
    code, out, err = run(
        "bench", "launch", "--out", str(tmp_path / "o.json"), "--compare", str(tmp_path / "no.json")
    )
    assert code == 2
    assert "no.json can't be read" in one_line(err)
    assert out == ""


@pytest.mark.parametrize(
    ("words", "told"), [(["-k", "zzz"], "no benchmark matches -k 'zzz'"), (["-k", "(("], "-k '(('")]
)
def test_bench_of_nothing_says_so_and_writes_nothing(suite, words, told):
    done = bench(suite, *words)
    assert done.returncode == 2
    assert told in one_line(done.stderr)
    assert not (suite / "out.json").exists()


def test_bench_in_a_terminal_says_what_was_wrong(suite):
    """Its bar is gone by then, and has left stderr as it was."""
    code, told = in_a_terminal([*BENCH, str(suite), "bench", "-k", "zzz"], cwd=suite)
    assert code == 2
    assert "no benchmark matches -k 'zzz'" in told


def test_bench_that_sigterm_stops_leaves_nothing_behind(suite):
    # A signal that comes just before the system's sleep is handled after it, so each sleep is short.
    (suite / "bench_fake.py").write_text(
        "import time\ndef test_slow(benchmark):\n    open('began', 'w').close()\n"
        "    for _ in range(30_000):\n        time.sleep(0.01)\n"
    )
    scratch = suite / "scratch"
    scratch.mkdir()
    process = warm_python.Popen(
        [*BENCH, str(suite), "bench", "--out", str(suite / "out.json")],
        stderr=subprocess.PIPE,
        cwd=suite,
        env={**os.environ, "TMPDIR": str(scratch)},
        text=True,
    )
    assert until((suite / "began").exists)
    assert any(scratch.iterdir())
    process.terminate()
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == 143
    assert "minidist: stopped by SIGTERM" in err
    assert not any(scratch.iterdir())
    assert not (suite / "out.json").exists()


@pytest.mark.parametrize(
    ("file", "text", "code", "why"),
    [
        ("bench_fake.py", "import a_module_that_nobody_has\n", 2, "a_module_that_nobody_has"),
        ("conftest.py", "def pytest_collection_modifyitems():\n    raise OSError('planted')\n", 1, "planted"),
        ("out.json", "not json", 2, "out.json is not JSON"),  # before it spends minutes
    ],
)
def test_bench_that_cannot_begin_says_why(suite, file, text, code, why):
    (suite / file).write_text(text)
    done = bench(suite)
    assert done.returncode == code
    assert why in one_line(done.stderr)


def test_bench_leaves_out_a_suite_that_cannot_run_here_and_says_why(suite):
    left_out = "import pytest\npytest.skip('there is no GPU: it needs one', allow_module_level=True)\n"
    (suite / "bench_other.py").write_text(left_out)
    done = bench(suite, "other")
    assert done.returncode == 2
    assert one_line(done.stderr) == "minidist: there is no GPU: it needs one\n"
    assert not (suite / "out.json").exists()
    done = bench(suite, "fake", "-k", "left_out")
    assert re.search(r"^0 benchmarks in \d+ s, so nothing is kept\.$", done.stdout, re.MULTILINE)
    assert not (suite / "out.json").exists()
    done = bench(suite, "-k", "good")
    assert done.returncode == 0
    assert "skipped other: there is no GPU: it needs one" in done.stdout
    assert json.loads((suite / "out.json").read_text())["benchmarks"][0]["name"] == "test_good"


def test_a_missing_extra_names_the_command(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("bench")
    assert code == 2
    assert (
        one_line(err)
        == "minidist: minidist bench needs pytest and pytest-benchmark: pip install 'minidist[bench]'\n"
    )


def test_report_shows_and_writes_a_page(run, suite, monkeypatch):
    assert bench(suite, "-k", "good or turns").returncode == 0
    monkeypatch.chdir(suite)
    code, out, err = run("report", "--results", ".")
    assert (code, err) == (0, "")
    assert "a good one" in out
    assert "This machine has no results yet" in out  # they are not under its name
    assert "The CUDA ladder is not measured yet" in out
    html = (suite / "report.html").read_text()
    assert "half of it" in html
    assert "The CUDA ladder is not measured yet" in html
    (suite / "report.html").unlink()
    code, out, err = run("report", "--results", ".", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["machines"]["out"]["sections"][0]["title"] == "things"
    assert not (suite / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "more", "limit"), [("new", [], 20_000), ("there", [], 20_000), ("there", ["--markdown"], 1000)]
)
def test_report_on_a_full_disk_leaves_what_was_there(run, tmp_path, name, more, limit):
    """Planted: no file may be larger than the limit, and the report is."""
    (tmp_path / "there").write_text("the old report")
    results.save(measured.machine(*measured.strategies()), tmp_path / "results" / "made-up.json")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        words = ("--results", str(tmp_path / "results"), "--out", str(tmp_path / name), *more)
        code, _, err = run("report", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert one_line(err) == f"minidist: {tmp_path / name}: File too large\n"
    assert {path.name for path in tmp_path.iterdir()} == {"there", "results"}
    assert (tmp_path / "there").read_text() == "the old report"


def test_another_cpus_kernel_is_not_what_numpy_is_measured_with():
    text = (
        "import os; from minidist.cli import bench; bench.unset_coretype(); "
        "print(sorted(name for name in os.environ if 'OPENBLAS_C' in name or 'OPENBLAS_L' in name))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert one_line(done.stderr).startswith(
        "minidist: OPENBLAS_CORETYPE=Haswell and OPENBLAS_L2_SIZE=512 unset"
    )


def test_mistakes_are_listed_and_shown(run):
    code, out, _ = run("mistakes", "--list", "tensor", "one-rank-logs")
    assert code == 0
    assert len(out.splitlines()) == 9
    code, out, _ = run("mistakes", "--show", "one-rank-logs")
    assert code == 0
    assert "+        if rank == 0:\n+            comm.all_reduce(loss.detach().clone())" in out
    assert re.search(r"^order +rank 0 calls all_reduce of \[\]|^order +rank 1 calls", out, re.MULTILINE)
    found = json.loads(run("mistakes", "one-rank-logs", "--json")[1])
    assert found["one-rank-logs"]["placements"]["sentence"].startswith("rank 0 calls all_reduce of []")
    assert "did you mean 'tied-weights-not-summed'" in one_line(run("mistakes", "tied-weights")[2])
