"""bfloat16 on CPUs whose products end torch. Programs that die stand for such a CPU."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import minidist as md
from minidist.parallel.training import bf16_on_cpu
from minidist.parallel.training.bf16_on_cpu import CURE, NAMES, VARIABLE, Outcome, avoid, outcome

NOTE = "import os; open(os.environ['MINIDIST_CACHE_DIR'] + '/tried', 'a').write('x'); "
DIE = "os.kill(os.getpid(), {})"
SIGILL = NOTE + f"os.environ.get('{VARIABLE}') or " + DIE.format(4)
REFUSED = NOTE + f"assert os.environ.get('{VARIABLE}'), 'could not create a primitive'"
LAYOUT = md.Layout(precision="bf16")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`tried(program)` has children run this program; `tried()` says how many have."""
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(bf16_on_cpu, "_avoided", False)

    def forget() -> None:
        outcome.cache_clear()
        bf16_on_cpu._survives.cache_clear()

    def get(program: str | None = None) -> int:
        if program is not None:
            monkeypatch.setattr(bf16_on_cpu, "PROGRAM", program)
        forget()
        notes = tmp_path / "tried"
        return len(notes.read_text()) if notes.exists() else 0

    get(SIGILL)
    yield get
    forget()


def prepared(layout: md.Layout = LAYOUT) -> torch.dtype:
    return next(md.prepare(nn.Linear(2, 2), torch.optim.SGD, layout, nn.MSELoss()).model.parameters()).dtype


def test_this_cpu_survives_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where conftest.py has set the variable, with it."""
    bf16_on_cpu.products()
    monkeypatch.setattr(bf16_on_cpu, "LIMIT", 600.0)
    assert bf16_on_cpu._child({name: os.environ[name] for name in NAMES if name in os.environ}) == ""
    assert bf16_on_cpu._survives()


@pytest.mark.parametrize(("program", "died"), [(SIGILL, "SIGILL"), (REFUSED, "could not create a primitive")])
def test_a_fault_is_found_once_and_avoided(tried: Callable[..., int], program: str, died: str) -> None:
    tried(program)
    assert avoid() == Outcome(died, cured=True)
    assert os.environ[VARIABLE] == CURE
    assert tried() == 2  # without the variable and with it
    assert avoid() == Outcome(died, cured=True)
    assert prepared() == torch.bfloat16
    assert tried() == 2
    assert md.launch(lambda: os.environ[VARIABLE], 2) == [CURE] * 2


def test_ranks_find_it_themselves_and_one_tries_for_all(tried: Callable[..., int]) -> None:
    def train() -> tuple[str, torch.dtype, str]:
        bf16_on_cpu.PROGRAM = SIGILL
        return os.environ[VARIABLE], prepared(md.Layout(dp=3, precision="bf16")), os.environ[VARIABLE]

    assert md.launch(train, 3) == [("", torch.bfloat16, CURE)] * 3
    assert os.environ[VARIABLE] == ""
    assert tried() == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_users_own_value_stays(
    tried: Callable[..., int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "AVX2")
    assert avoid() is None
    assert prepared() == torch.bfloat16
    assert [os.environ[each] for each in NAMES] == ["AVX2" if each == name else "" for each in NAMES]
    assert tried() == 0


def test_bf16_is_refused_where_it_would_end_the_process(
    tried: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def die(backward: bool = True) -> None:
        os.kill(os.getpid(), signal.SIGILL)

    monkeypatch.setattr(bf16_on_cpu, "products", die)
    for _ in range(2):  # the variable that the first call has set helps the second no more
        with pytest.raises(
            ValueError, match=f"die \\(SIGILL\\). {VARIABLE}={CURE} .* has computed .* set it"
        ):
            prepared()
    tried(NOTE + DIE.format(4))
    monkeypatch.setattr(bf16_on_cpu, "_avoided", False)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=f"also with {VARIABLE}={CURE}; give precision='fp32'"):
        prepared()
    assert os.environ[VARIABLE] == ""


def test_what_comes_from_outside_is_no_fault(
    tried: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, program in enumerate((DIE.format(9), "1 / 0", "import time; time.sleep(60)"), 1):
        monkeypatch.setattr(bf16_on_cpu, "LIMIT", 20.0 if count < 3 else 0.5)
        tried(NOTE + program)
        assert avoid() is None
        assert tried() <= count  # and not remembered
