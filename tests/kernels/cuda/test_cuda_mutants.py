"""That the checks of the CUDA ladder can fail: each mistake planted in a rung is found by the check named.

Without a mistake and with the same tiles every rung passes all of them.
"""

import dataclasses
import importlib

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
pytest.importorskip("ml_dtypes")

from minidist.kernels.cuda.runtime import gpu_driver
from tests.helpers.cuda_kernels import without_gpu  # noqa: F401
from tests.helpers.cuda_mutants import (
    built,
    caught_by,
    caught_by_assembling,
    caught_by_counting,
    forget,
    planted,
    swap,
)

COUNTED = ("bank conflicts", "uncoalesced")
ASSEMBLED = ("spills", "stack", "missing STG.128", "looped copies")
ALIGNED = (64, 128, 64)  # m, n, k where sectors are counted

# The usual sizes, ragged and of several tiles each way, and the dtype.
USUAL = {
    "s2_coalesced": ((37, 45, 70), "float32"),
    "s3_shared_tile": ((37, 45, 70), "float32"),
    "s4_thread_tile_1d": ((70, 141, 53), "float32"),
    "s5_thread_tile_2d": ((133, 141, 53), "float32"),
    "s6_vector_loads": ((133, 141, 53), "float32"),
    "s7_async_copy": ((133, 141, 53), "float32"),
    "s8_warp_tile": ((70, 140, 53), "float32"),
    "s9_tensor_core": ((37, 141, 300), "float16"),
    "s10_hopper": ((300, 250, 280), "float16"),
}
SECTORS = {"s2_coalesced": 2.5, "s3_shared_tile": 4, "s4_thread_tile_1d": 4, "s5_thread_tile_2d": 4}
# The most registers, and instructions without which the idea is not there.
ASSEMBLER = {
    "s4_thread_tile_1d": (96, {"FFMA": 64}),
    "s5_thread_tile_2d": (128, {"FFMA": 64}),
    "s6_vector_loads": (128, {"LDG.128": 2, "LDS.128": 4, "STG.128": 16}),
}


SMALL_TILES = ("s8_warp_tile", "s9_tensor_core", "s10_hopper")


def small_tiles(rung, module):
    """Tiles that compile in less time, where as much can go wrong: several warps, a ring that wraps."""
    if rung == "s8_warp_tile":
        module.SMALL = module.LARGE = dataclasses.replace(
            module.SMALL, rows=64, columns=64, own_rows=8, own_columns=4, stages=3, blocks=1
        )
    elif rung == "s9_tensor_core":
        module.SMALL = module.BlockTile(warps_down=1, warps_across=2, warp_rows=16, stages=3)
    elif rung == "s10_hopper":
        module.COLUMNS, module.SHARED = (128,), 128 * 1024  # three slots


MUTANTS = planted()


def cases():
    """For each check its first mistake, and for each rung one; the others take minutes to compile.

    With `deep` also each rung's first, and rungs 8 to 10, where each takes seconds.
    """
    seen = set()
    for rung, mutants in MUTANTS.items():
        news = [
            mutant
            for mutant in {m.caught: m for m in reversed(mutants)}.values()
            if mutant.caught not in seen
        ]
        always = [] if rung in SMALL_TILES else news or mutants[:1]
        for mutant in mutants:
            name = f"{rung.partition('_')[0]}-{mutant.mistake}"
            more = pytest.mark.deep if mutant in (mutants[0], *news) else pytest.mark.faults
            yield pytest.param(rung, mutant, id=name, marks=[] if mutant in always else [more])
        seen |= {mutant.caught for mutant in mutants}


def caught(rung, mutant, folder):
    """The name of the check that finds the mistake, and what it says."""
    module = built(rung, mutant.changes, folder)
    small_tiles(rung, module)
    sizes, dtype = USUAL[rung]
    try:
        if mutant.caught in COUNTED:
            return caught_by_counting(module.RUNG, ALIGNED, dtype, SECTORS.get(rung, 16))
        if mutant.caught in ASSEMBLED:
            return caught_by_assembling(module.RUNG, dtype, *ASSEMBLER.get(rung, (168, {})))
        return caught_by(module.RUNG, mutant.sizes or sizes, dtype)
    finally:
        forget(module)


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
    module = importlib.import_module(f"minidist.kernels.cuda.{rung}")
    if rung in SMALL_TILES:
        monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
        module = built(rung, (), tmp_path)
        small_tiles(rung, module)
    sizes, dtype = USUAL[rung]
    for several in {mutant.sizes or sizes for mutant in MUTANTS[rung]} | {sizes}:
        assert caught_by(module.RUNG, several, dtype) == ("", "")
    assert caught_by_counting(module.RUNG, ALIGNED, dtype, SECTORS.get(rung, 16)) == ("", "")
    if rung in ASSEMBLER:
        assert caught_by_assembling(module.RUNG, dtype, *ASSEMBLER[rung]) == ("", "")
    if rung in SMALL_TILES:
        forget(module)


def test_text_that_is_not_there_is_no_mutant(tmp_path):
    with pytest.raises(AssertionError, match=r"s3_shared_tile.py has 'no such text' 0 times, not 1"):
        built("s3_shared_tile", swap("no such text", ""), tmp_path)
    with pytest.raises(AssertionError, match=r"2 times, not 1"):
        built("s3_shared_tile", swap("cuda.syncthreads()", ""), tmp_path)
