"""That the checks of the CUDA ladder can fail: each mistake planted in a rung is found by the check named.

Without a mistake and with the same tiles every rung passes all of them.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
pytest.importorskip("ml_dtypes")

from minidist.kernels.cuda.runtime import gpu_driver
from minidist.kernels.emulator.mistakes import mutants, silicon
from minidist.kernels.emulator.mistakes.mutants import SMALL_TILES, USUAL, built, forget, small_tiles, swap
from tests.helpers.cuda_kernels import without_gpu  # noqa: F401
from tests.helpers.machine_code import launches, shortcomings

ASSEMBLED = ("spills", "stack", "missing STG.128", "looped copies")
# The most registers, and instructions without which the idea is not there.
ASSEMBLER = {
    "s4_thread_tile_1d": (96, {"FFMA": 64}),
    "s5_thread_tile_2d": (128, {"FFMA": 64}),
    "s6_vector_loads": (128, {"LDG.128": 2, "LDS.128": 4, "STG.128": 16}),
}

MUTANTS = mutants.planted()


def cases():
    """For each check its first mistake, and for each rung one; the others take minutes to compile.

    With `deep` also each rung's first, and rungs 8 to 10, where each takes seconds.
    """
    seen = set()
    for rung, planted in MUTANTS.items():
        news = [
            mutant
            for mutant in {m.caught: m for m in reversed(planted)}.values()
            if mutant.caught not in seen
        ]
        always = [] if rung in SMALL_TILES else news or planted[:1]
        for mutant in planted:
            name = f"{rung.partition('_')[0]}-{mutant.mistake}"
            more = pytest.mark.deep if mutant in (planted[0], *news) else pytest.mark.faults
            yield pytest.param(rung, mutant, id=name, marks=[] if mutant in always else [more])
        seen |= {mutant.caught for mutant in planted}


def caught(rung, mutant, folder):
    """The name of the check that finds the mistake, and what it says."""
    module = built(rung, mutant.changes, folder)
    small_tiles(rung, module)
    try:
        if mutant.caught in ASSEMBLED:
            return caught_by_assembling(module.RUNG, USUAL[rung][1], *ASSEMBLER.get(rung, (168, {})))
        return mutants.caught(rung, module, mutant)
    finally:
        forget(module)


def caught_by_assembling(step, dtype, registers, wanted):
    """As `mutants.caught_by`: what the assembler says of the kernel for 64 x 64 x 64, or the first of 64."""
    kernel, types, _ = launches(step, dtype, 64)[0]
    found = shortcomings(kernel.compile(types, kernel.architecture), registers, wanted)
    return (found[0], str(found)) if found else ("", "")


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """Few, so that blocks of rung 10 take several tiles."""
    monkeypatch.setattr(gpu_driver, "multiprocessors", lambda: 2)


@pytest.mark.parametrize(("rung", "mutant"), [*cases()])
def test_a_mistake_is_caught_by_the_check_named(rung, mutant, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))  # nobody asks for these kernels again
    name, said = caught(rung, mutant, tmp_path)
    assert name == mutant.caught, said


@pytest.mark.parametrize(
    "rung", [pytest.param(rung, marks=pytest.mark.deep if rung in SMALL_TILES else ()) for rung in USUAL]
)
def test_without_a_mistake_all_checks_pass(rung, tmp_path, monkeypatch):
    """Rungs whose tiles stay the same are those of the ladder: its tests have compiled them."""
    module = importlib.import_module(f"minidist.kernels.cuda.{rung.replace('/', '.')}")
    if rung in SMALL_TILES:
        monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
        module = built(rung, (), tmp_path)
        small_tiles(rung, module)
    sizes, dtype = USUAL[rung]
    for several in {mutant.sizes or sizes for mutant in MUTANTS[rung]} | {sizes}:
        assert mutants.caught_by(module.RUNG, several, dtype) == ("", "")
    sectors = mutants.SECTORS.get(rung, 16)
    assert mutants.caught_by_counting(module.RUNG, mutants.ALIGNED, dtype, sectors) == ("", "")
    if rung in ASSEMBLER:
        assert caught_by_assembling(module.RUNG, dtype, *ASSEMBLER[rung]) == ("", "")
    if rung in SMALL_TILES:
        forget(module)


def test_text_that_is_not_there_is_no_mutant(tmp_path):
    with pytest.raises(AssertionError, match=r"s3_shared_tile.py has 'no such text' 0 times, not 1"):
        built("s3_shared_tile", swap("no such text", ""), tmp_path)
    with pytest.raises(AssertionError, match=r"2 times, not 1"):
        built("s3_shared_tile", swap("cuda.syncthreads()", ""), tmp_path)


def test_twenty_are_put_to_silicon_and_the_emulator_names_each_fault():
    chosen = silicon.cases()  # each is one of those above
    assert len({*chosen}) == 20
    kinds = {mutant.caught for _, mutant in chosen}
    assert len(kinds) >= 9
    assert not kinds & {"wrong numbers", *ASSEMBLED}


def test_a_broken_kernel_is_counted_and_one_that_is_slow_alone_is_not(tmp_path):
    names = [mutant.mistake for _, mutant in silicon.cases()]
    sizes = USUAL["s3_shared_tile"][0]
    race = silicon.run_one(names.index("no barrier after their use"), 2, sizes, tmp_path)
    assert (race.runs, race.wrong) == (1, 1)
    assert "race" in race.error
    slow = silicon.run_one(names.index("a warp reads a column"), 2, sizes, tmp_path)
    assert str(slow) == "0 of 2 runs wrong"


def test_runs_are_counted_until_one_takes_the_gpu_away():
    right = torch.ones(4)
    calls = iter([right, right * 2, torch.tensor([1, 1, 1, float("nan")]), right])
    found = silicon.tally(lambda: next(calls), right, 5, lambda: None)
    assert (found.runs, found.wrong, found.elements) == (5, 3, 1.0)
    assert str(found).startswith("3 of 5 runs wrong, 100.00% of the elements (StopIteration")
    assert silicon.tally(lambda: right, right, 7, lambda: None) == (7, 0, 0.0, 0.0, "")


def test_a_process_that_loses_the_gpu_is_started_again(monkeypatch):
    said = iter(['noise\n[3, 1, 0.0, 0.0, "illegal address"]', '[1000, 2, 0.5, 0.0, ""]', "", ""])

    def run(command, **options):
        return SimpleNamespace(stdout=next(said), returncode=-6)

    monkeypatch.setattr(silicon.subprocess, "run", run)
    assert str(silicon.in_processes(0, [])) == "3 of 1003 runs wrong, 50.00% of the elements"
    assert str(silicon.in_processes(0, [])) == "2 of 2 runs wrong (exit code -6)"


def test_without_a_gpu_there_is_nothing_to_run_on(capsys):
    with pytest.raises(SystemExit):
        silicon.main(["--gpu"])
    assert "there is no GPU here" in capsys.readouterr().err
