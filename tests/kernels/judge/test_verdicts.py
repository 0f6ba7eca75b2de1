"""Kernels of readers: the right ones pass and cost what they cost; tricks, mistakes and bad files do not."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.kernels.cuda.runtime import device
from minidist.kernels.emulator.mistakes import mutants
from minidist.kernels.emulator.mistakes.patches import changed
from minidist.kernels.judge import PROBLEMS, Verdict, verdicts
from tests.helpers import warm_python
from tests.lessons.wrong_answers import Wrong, wrong_answers

ROOT = Path(__file__).parents[3]
PARS = ROOT / "examples/judge/pars.py"
Judge = Callable[[str], Verdict]
HEAD = """
import gc, os, sys
import numpy as np
from numba import cuda, float32
from minidist.kernels import rung
from minidist.kernels.emulator import launch
"""
ADD = """
@cuda.jit
def kernel(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]

def add(x, y, out):
    launch(kernel, -(-x.size // 256), 256, x, y, out)
"""


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """The verdict on a text, with one function named after a problem."""
    device.require_compiler()  # to find its libraries starts a program that is not Python
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)

    def judge(text: str) -> Verdict:
        path = tmp_path / "answer.py"
        path.write_text(text)
        [verdict] = verdicts.judge(path)
        return verdict

    return judge


SLOW = ("attention", "attention_causal")  # seconds of the emulator


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.deep] * (one in SLOW)) for one in PROBLEMS]
)
def test_a_solution_of_each_problem_is_par(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)
    [verdict] = verdicts.judge(PARS, [name])
    assert (verdict.wrong, verdict.score) == ("", 100)


COPY = "@cuda.jit\ndef copy(x, out):\n    for i in range(out.size):\n        out[i] = x[i]\n"
TRICKS = {
    "returns its input": "def add(x, y, out):\n    return x",
    "gives its input": COPY + "def add(x, y, out):\n    launch(copy, 1, 1, x, out)",
    "computes in NumPy": "def add(x, y, out):\n    out[:] = x + y",
    "computes in NumPy and copies": COPY + "def add(x, y, out):\n    launch(copy, 1, 1, x + y, out)",
    "takes the expected numbers": COPY
    + """
from minidist.kernels.judge.problems import PROBLEMS
def add(x, y, out):
    case = PROBLEMS["add"].make(np.random.default_rng(0), x.size)
    launch(copy, 1, 1, case.expected.astype(np.float32), out)
""",
    "knows them when imported": """
from minidist.kernels.judge.problems import PROBLEMS
TABLE = PROBLEMS["add"].make(np.random.default_rng(0), 64).expected.astype(np.float32)
@cuda.jit
def kernel(out):
    table = cuda.const.array_like(TABLE)
    for i in range(out.size):
        out[i] = table[i % 64]
def add(x, y, out):
    launch(kernel, 1, 1, out)
""",
    "keeps results by address": COPY
    + """
KNOWN = {}
def add(x, y, out):
    launch(copy, 1, 1, KNOWN.setdefault(x.ctypes.data % 2, out), out)
""",
    "fills all arrays that it finds": """
def add(x, y, out):
    for array in gc.get_objects():
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array.fill(0)
    for module in list(sys.modules.values()):
        for array in list(vars(module).values()):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array.fill(0)
""",
    "changes the checker": """
from minidist.kernels.judge import problems, verdicts
from minidist.kernels.emulator.execution import run_grid as run
verdicts._wrong = lambda *_: ""
verdicts._costs = verdicts._verdict = verdicts.judge = lambda *_: 1000
np.abs = np.argmax = np.count_nonzero = lambda *_: 0
problems.PROBLEMS["add"].make.__defaults__ = (0,)
def add(x, y, out):
    pass
""",
    "answers in the place of its process": """
def add(x, y, out):
    for number in range(3, 20):
        try:
            os.write(number, b'{"problems": {"add": []}, "programs": [], "score": 1000}')
        except OSError:
            pass
    os._exit(0)
""",
    "is right for the scored size alone": ADD.replace("i < out.size", "True"),
    "reads beyond its input": ADD.replace("x[i] + y[i]", "x[i] + y[i + 1]"),
    "writes to its input": ADD.replace("out[i] =", "x[i] ="),
    "has a race": ADD.replace("out[i] =", "out[0] ="),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_scores_nothing(judge: Judge, trick: str) -> None:
    verdict = judge(HEAD + TRICKS[trick])
    assert verdict.wrong
    assert (verdict.score, verdict.costs) == (0, None)


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ("open('/etc/passwd')", "opens the file /etc/passwd"),
        ("open(f'/proc/{os.getppid()}/mem', 'rb')", "opens the file /proc/"),
        ("open('notes.txt', 'w')", "opens the file notes.txt"),
        ("__import__('socket').socket()", "opens a socket"),
        ("__import__('subprocess').run(['true'])", "starts a process"),
        ("os.system('true')", "starts a process"),
        ("os.fork()", "starts a process"),
        ("os.kill(os.getppid(), 9)", "goes past Python to the system"),
        ("__import__('ctypes').CDLL(None)", "goes past Python to the system"),
    ],
)
def test_a_file_that_opens_things_is_stopped(judge: Judge, tried: str, said: str) -> None:
    """Also one that would not mind."""
    text = f"{HEAD}{ADD}    try:\n        {tried}\n    except BaseException:\n        pass\n"
    with pytest.raises(
        ValueError, match=rf"answer.py:{len(text.splitlines()) - 2}: the file {said}.*stopped"
    ):
        judge(text)


LOOP = (
    "\n@cuda.jit\ndef loop(x, out):\n    i = 0\n    while x[0] + i != -1:\n        i += 1\n    out[0] = i\n"
)
MUCH = """
@cuda.jit
def kernel(x, out):
    array = cuda.local.array(1 << 24, float32)
    for i in range(x.size):
        array[i] = x[i]
    for i in range(x.size):
        out[0] += array[i]

def reduction(x, out):
    launch(kernel, 1, 1, x, out)
"""
SENTENCES = {
    "a kernel that does not end": (
        LOOP + "def reduction(x, out):\n    launch(loop, 1, 1, x, out)",
        "too slow: 20,00. steps of the emulator so far, and the judge allows 20,000 a case",
    ),
    "too many launches": (
        "def reduction(x, out):\n    while True:\n        launch(lambda x: None, 1, 1, x)",
        "answer.py:9: ValueError: more than 100 launches",
    ),
    "a thread with much memory": (MUCH, "67108864 bytes of local memory, and GPUs give it 524288"),
    "large arrays": (
        "def reduction(x, out):\n    launch(lambda x: None, 1, 1, np.empty(1 << 28, np.int8))",
        "makes arrays of 268,435,456 bytes",
    ),
    "a function that launches nothing": (
        "def add(x, y, out):\n    out[:] = x + y",
        "with n = 1, it launches no kernel, and nothing else can write to out",
    ),
    "a kernel that writes nothing": (
        ADD.replace("out[i] = x[i] + y[i]", "x[i] + y[i]"),
        r"out\[0\] is nan, as if nobody had written it",
    ),
    "a name that is not there": (
        ADD.replace("x[i]", "z[i]"),
        r"answer.py:\d+: TypingError: NameError: name 'z'",
    ),
    "a kernel's arguments": (
        ADD.replace("x, y, out):\n    i", "x, out):\n    i"),
        "kernel takes 2 arguments",
    ),
    "a launch that needs a GPU": (
        ADD.replace("launch(kernel, -(-x.size // 256), 256, x, y, out)", "kernel[8, 256](x, y, out)"),
        r"answer.py:15: .*needs a GPU: launch with minidist.kernels.emulator.launch here",
    ),
    "other arguments": (
        ADD.replace("def add(x, y, out)", "def add(x, out)"),
        r"add\(x, out\) has other arguments than the problem: add\(x, y, out\)",
    ),
    "a kernel for a function": (
        "@cuda.jit\ndef add(x, y, out):\n    out[0] = 1",
        r"write a function add\(x, y, out\) that launches",
    ),
    "rounds to tensor cores' bits": (
        "def matmul(a, b, out):\n    rung('s9_tensor_core').matmul(a, b, out=out)",
        r"out\[.* is right: \d+ of",
    ),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_what_is_wrong_is_said_in_a_sentence(
    judge: Judge, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = SENTENCES[what]
    if "too slow" in said:
        monkeypatch.setattr(verdicts, "STEPS", 20_000)
    verdict = judge(HEAD + text)
    assert re.search(said, verdict.wrong), verdict.wrong


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def add(x, y, out:", r"answer.py:1: SyntaxError: '\(' was never closed"),
        ("import nothing_of_the_kind\nadd = 1", r"answer.py:1: ModuleNotFoundError: No module named"),
        ("add = 1\n__import__('os')._exit(3)", r"answer.py ended its process \(exit code 3\)"),
        ("class Sums:\n    def add(self): pass", "defines no function named after a problem"),
        ("def sum(x, out): pass", "defines no function named after a problem: add, transpose"),
    ],
)
def test_a_file_that_cannot_run_is_refused_in_a_sentence(judge: Judge, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        judge(text)


def test_a_function_that_does_not_come_back_costs_no_other_its_verdict(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "CALLING", 0.2)
    path = tmp_path / "answer.py"
    loop = "def add(x, y, out):\n    while True:\n        pass\n"
    path.write_text(f"import os\n{loop}def transpose(x, out): os._exit(3)\ndef reduction(x, out): pass")
    endless, dead, other = verdicts.judge(path)
    assert re.search(r"answer.py:[34]: TimeoutError: it had not ended after 0.2 s: does a", endless.wrong)
    assert "answer.py ended its process (exit code 3): it said nothing" in dead.wrong
    assert other.wrong.endswith("it launches no kernel, and nothing else can write to out")


def test_a_file_that_does_not_end_is_stopped(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts.LOADING <= 15
    monkeypatch.setattr(verdicts, "LOADING", 0.2)
    with pytest.raises(ValueError, match=r"answer.py:[2-5]: the file had not ended after 0.2 s: does a loop"):
        judge("add = 1\nwhile True:\n    try:\n        pass\n    except BaseException:\n        pass")
    monkeypatch.undo()
    path = tmp_path / "answer.py"
    path.write_text("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nadd = 1\nwhile True:\n    pass")
    monkeypatch.setattr(verdicts, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"had not ended after 0.2 s: does a loop go on for ever"):
        verdicts.judge(tmp_path / "answer.py", ["add"])
    with pytest.raises(ValueError, match=r"none.py cannot be read .*: name a Python file"):
        verdicts.judge(tmp_path / "none.py")


def test_the_score_is_the_same_each_time_and_nothing_that_python_does_changes_it(judge: Judge) -> None:
    honest = judge(HEAD + ADD)
    lies = (
        "from minidist.kernels.judge import verdicts\nfrom minidist.kernels.emulator.machine import counts\n"
    )
    lies += "verdicts.Costs.total = property(lambda _: 1)\ncounts.Counts.step = lambda *_: None\n"
    assert judge(HEAD + lies + ADD) == honest == judge(HEAD + ADD)
    assert 0 < honest.score < 100


def test_scored_numbers_are_those_of_the_kernels_own_checksum(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a kernel that holds the result for some numbers is scored with others."""
    add, seen = PROBLEMS["add"], []

    @functools.wraps(add.make)
    def make(draw: Any, n: int) -> Any:
        case = add.make(draw, n)
        seen.append(case.inputs["x"][:2].tolist())
        return case

    monkeypatch.setitem(PROBLEMS, "add", dataclasses.replace(add, make=make))
    other = ADD.replace("x[i] + y[i]", "y[i] + x[i]")
    moved = "\n\n# a comment" + ADD.replace("kernel", "another_name")
    scored = [(judge(HEAD + text), seen[-1])[1] for text in (ADD, ADD, moved, other)]
    assert scored[0] == scored[1] == scored[2] != scored[3]
    assert len({*map(str, seen)}) == len(seen) - 2  # other cases are fresh each time


def copies(side: tuple[int, int]) -> str:
    """A transpose without shared memory, a thread an element."""
    text = "@cuda.jit\ndef k(a, out):\n    j, i = cuda.grid(2)\n    if i < a.shape[0] and j < a.shape[1]:\n"
    text += "        out[j, i] = a[i, j]\ndef transpose(a, out):\n    m, n = a.shape\n"
    return text + f"    launch(k, (-(-n // {side[0]}), -(-m // {side[1]})), {side}, a, out)"


def test_few_threads_and_access_that_does_not_coalesce_are_dear(judge: Judge) -> None:
    """A warp of 8 x 4 threads reads 4 lines and writes 8: ten more than the least."""
    wide, small, large = (judge(HEAD + copies(side)) for side in ((32, 8), (8, 4), (8, 32)))
    assert 1 <= wide.score < small.score < large.score < 100
    for verdict, more in ((wide, 31), (small, 10), (large, 10)):
        assert verdict.costs is not None
        assert verdict.costs.conflicts == 2048 * more
    one_warp = judge(HEAD + ADD.replace("256", "32")).costs
    eight = judge(HEAD + ADD).costs
    assert one_warp is not None
    assert eight is not None
    assert (one_warp.instructions, one_warp.registers) == (eight.instructions, 64)
    assert one_warp.total > eight.total


def test_what_is_right_has_a_point_at_least(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBLEMS, "add", dataclasses.replace(PROBLEMS["add"], par=1))
    assert judge(HEAD + ADD).score == 1


SUM = """
@cuda.jit
def kernel(x, out):
    i = cuda.grid(1)
    if i < x.size and x[0] != 0:
        cuda.atomic.add(out, 0, x[i])

def reduction(x, out):
    launch(kernel, -(-x.size // 256), 256, x, out)
"""


BINS = """
@cuda.jit
def kernel(x, out):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(out, x[i], 1)

def histogram(x, out):
    launch(kernel, 256, 256, x, out)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SUM.replace("x[0] != 0", "x.size < 65536"), r"with n = 65536, out\[0\] is 0"),
        (SUM, r"it costs [\d,]+ on fresh numbers, and [\d,]+ on those that are scored"),
    ],
)
def test_a_kernel_that_suits_the_scored_numbers_alone_scores_nothing(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    """As if someone had found a kernel whose checksum gives zeros."""
    reduction, seen = PROBLEMS["reduction"], []

    @functools.wraps(reduction.make)
    def make(draw: Any, n: int) -> Any:
        seen.append(case := reduction.make(draw, n))
        if len(seen) < 8:
            return case
        return dataclasses.replace(case, inputs={"x": 0 * case.inputs["x"]}, expected=0 * case.expected)

    monkeypatch.setitem(PROBLEMS, "reduction", dataclasses.replace(reduction, make=make))
    assert re.search(said, judge(HEAD + text).wrong)
    assert len(seen) == 8


def test_names_and_the_folder_change_no_checksum_and_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)
    text = f"{HEAD}if True:\n{textwrap.indent(BINS, '    ')}"
    found = []
    for path in (tmp_path / "answer.py", tmp_path / "another_folder/kernels.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        [verdict] = verdicts.judge(path)
        found.append(verdict.costs)
    assert found[0] == found[1] is not None
    one, other = "call _ZN1a; call _ZN1b; call _ZN1a;", "call _ZN1a; call _ZN1b; call _ZN1b;"
    assert verdicts._code(one) == verdicts._code(one.replace("1b", "1c")) != verdicts._code(other)


def test_a_kernel_may_have_local_memory(judge: Judge) -> None:
    two = "a = cuda.local.array(2, float32)\n    a[0], a[1] = x[i % x.size], y[i % x.size]\n    if i"
    verdict = judge(HEAD + ADD.replace("if i", two).replace("x[i] + y[i]", "a[i % 2] + a[(i + 1) % 2]"))
    assert verdict.score > 0, verdict.wrong


@pytest.mark.parametrize("name", PROBLEMS)
def test_sizes_are_those_that_the_problem_allows(name: str) -> None:
    problem, draw = PROBLEMS[name], np.random.default_rng(0)
    tried = np.array([problem.some_sizes(draw) for _ in range(100)]).reshape(-1, len(problem.most))
    assert (tried >= 1).all()
    assert (tried <= problem.most).all()
    assert not (tried % problem.step).any()


def test_costs_are_counted(judge: Judge) -> None:
    costs = judge(HEAD + ADD).costs
    assert costs is not None
    assert (costs.sectors, costs.launches) == (3 * 65536 * 4 // 32, 1)
    assert (costs.conflicts, costs.barriers, costs.matrix) == (0, 0, 0)
    text = HEAD + "@cuda.jit\ndef k(x, out):\n    cuda.atomic.add(out, 0, x[cuda.grid(1)])\n"
    text += "def reduction(x, out):\n    for i in range(x.size):\n        launch(k, 1, 1, x[i:], out)"
    assert "more than 100 launches" in judge(text).wrong
    costs = judge(HEAD + BINS).costs
    assert costs is not None
    assert 3500 < costs.conflicts < 4500  # of 32 random bins of 256 some 1.9 are there twice: 2048 warps


GLUE = {
    "add": "def add(x, y, out):\n    launch(_own, -(-x.size // 32), 32, x, y, out)",
    "matmul": "def matmul(a, b, out):\n    side = max(out.shape)\n"
    "    launch(_own, (-(-side // 32), -(-side // 8)), (32, 8), a, b, out)",
    "sums": "@cuda.jit\ndef _finish(partial, out):\n    for i in range(192):\n        out[0] += partial[i]\n"
    "def reduction(x, out):\n    partial = np.empty(192, np.float32)\n    launch(_own, 3, 64, x, partial)\n"
    "    launch(_finish, 1, 1, partial, out)",
    "tiled_matmul": "def matmul(a, b, out):\n    m, n = out.shape\n"
    "    launch(_own, (-(-n // TILE), -(-m // TILE)), (TILE, TILE), a, b, out)",
    "transpose": "def transpose(a, out):\n    m, n = a.shape\n"
    "    launch(_own, (-(-n // 32), -(-m // 32)), (32, 32), a, out)",
    "flash_attention": "def attention(q, k, v, out):\n    logs = np.empty(q.shape[1], np.float32)\n"
    "    for one in zip(q, k, v, out):\n        launch(_own, -(-q.shape[1] // 64), 64, *one, logs, 0)",
    "register_tile": "def matmul(a, b, out):\n    m, n = out.shape\n"
    "    launch(_own, (-(-n // SIDE), -(-m // SIDE)), (16, 16), a, b, out)",
}
ANSWERS = [
    each
    for stem in (
        "03_cuda_from_python",
        "04_shared_memory",
        "05_register_tiles",
        "17_attention_without_the_square",
    )
    for each in wrong_answers(stem)
    if each.exercise in GLUE
]
# `launch` takes any function, and nobody asks for other tiles.
THE_SAME_HERE = ("forgets @cuda.jit", "compiles for the CPU", "knows only sixteen", "knows only four")
THE_SAME_HERE += ("sees what comes after", "does not skip")  # causal alone


def in_a_file(answer: str, exercise: str) -> str:
    """A lesson's answer, launched as the problem wants it. Other exercises of its file are no problems'."""
    answer = answer.replace("\nWIDTH = 16\n", "\nWIDTH = 64\n")
    plain = re.sub(r"^def (add|matmul|transpose)\b", r"def _\1", answer, flags=re.MULTILINE)
    own = f"_{exercise}" if exercise in ("add", "matmul", "transpose") else exercise
    return f"{plain}\n{HEAD}\n_own = {own}\n{GLUE[exercise]}"


def answer_cases() -> list[Any]:
    """One of each exercise; with `faults` all."""
    first = {each.exercise: each for each in reversed(ANSWERS)}.values()
    kept = [each for each in ANSWERS if each.mistake.name not in THE_SAME_HERE]
    return [
        pytest.param(
            each, id=f"{each.exercise}-{each.name}", marks=[] if each in first else [pytest.mark.faults]
        )
        for each in kept
    ]


@functools.cache
def score_of_the_solution(stem: str, exercise: str, judge: Judge) -> int:
    verdict = judge(in_a_file((ROOT / f"lessons/solutions/{stem}.py").read_text(), exercise))
    assert not verdict.wrong
    return verdict.score


@pytest.mark.parametrize("wrong", answer_cases())
def test_a_wrong_answer_of_a_lesson_is_rejected_or_scores_less(judge: Judge, wrong: Wrong) -> None:
    verdict = judge(in_a_file(wrong.text, wrong.exercise))
    assert verdict.wrong or verdict.score < score_of_the_solution(wrong.stem, wrong.exercise, judge)


NOT_HERE = (  # mistakes of causal float32, and of widths that are no multiple of 32
    *("a causal query does not see its own key", "a query sees what the first of its warp sees"),
    *("a causal block reads all keys", "reads a query past its last column"),
)
RUN = {
    "matmul": "RUNG.matmul(a, b, out=out)",
    "matmul_f16": "RUNG.matmul(a, b.T, out=out)",
    "attention": "RUNG.compute(*[host_matrix(x.reshape(-1, 64), 'float32') for x in (q, k, v, out)], "
    "host_matrix(np.empty((q.shape[0] * q.shape[1], 1), np.float32), 'float32'), q.shape[0], 0)",
}


def planted() -> list[Any]:
    """The ladders' mistakes in a rung's own file, of matmul's rungs 2 and 3; with `faults` all.

    Those of rung 10 need tensor maps, which the judge does not take.
    """
    return [
        pytest.param(
            rung,
            mutant,
            id=f"{rung[:12]}-{mutant.mistake}",
            marks=[pytest.mark.faults] * (rung[:2] not in ("s2", "s3")),
        )
        for rung, several in mutants.planted().items()
        for mutant in several
        if not any(line[0] == "@" for line in mutant.changes) and mutant.mistake not in NOT_HERE
        if rung != "s10_hopper"
    ]


@pytest.mark.parametrize(("rung", "mutant"), planted())
def test_a_mistake_of_the_ladder_is_rejected_or_scores_less(judge: Judge, rung: str, mutant: Any) -> None:
    half = mutants.USUAL[rung][1] == "float16"
    name = "attention" if "/" in rung else "matmul_f16" if half else "matmul"
    package = f"minidist.kernels.cuda.{rung}".replace("/", ".").rpartition(".")[0]

    def judged(changes: Any) -> Verdict:
        text = changed((mutants.FOLDER / f"{rung}.py").read_text(), [*changes])
        text = re.sub(r"^from \.(\w)", rf"from {package}.\1", text, flags=re.MULTILINE)
        text = re.sub(r"^from \.\.(\w)", r"from minidist.kernels.cuda.\1", text, flags=re.MULTILINE)
        text += "\nimport numpy as np\nfrom minidist.kernels.cuda.runtime.matrix import host_matrix\n"
        given = ", ".join(PROBLEMS[name].make(np.random.default_rng(), *PROBLEMS[name].step).inputs)
        return judge(f"{text}\ndef {name}({given}, out):\n    {RUN[name]}\n")

    verdict = judged(mutant.changes)
    assert verdict.wrong or verdict.score < judged(()).score
