"""Mutants: a rung's source with one mistake in it, built beside the rung and put to the checks of the rung.

A check that cannot fail says nothing. So each mistake names the check that has to find it: the kind of the
emulator's Fault, "wrong numbers", "bank conflicts", "uncoalesced", "moves too much", or what the assembler
reports.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ... import cuda
from ...attention_rung import AttentionRung
from ...measure import attention_reference as attention
from ...measure import product_checks
from ..launch_and_profile import profiled
from ..ptx.fault import Fault
from .patches import changed, mistakes_in

FOLDER = Path(cuda.__file__).parent
COUNTED = ("bank conflicts", "uncoalesced", "moves too much")
ALIGNED = (64, 128, 64)  # m, n, k where sectors are counted
ALIGNED_HEAD = ((1,), 256, 256, 64)  # of attention
SECTORS = {"s2_coalesced": 2.5, "s3_shared_tile": 4, "s4_thread_tile_1d": 4, "s5_thread_tile_2d": 4}
SECTORS |= {"attention/s2_warp_rows": 4, "attention/s3_shared_tiles": 4}
# The usual sizes, ragged and of several tiles each way; of attention heads, queries, keys, width.
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
    "attention/s2_warp_rows": ((2, 37, 37, 33), "float32"),
    "attention/s3_shared_tiles": ((2, 70, 70, 40), "float32"),
    "attention/s4_tensor_core": ((2, 70, 70, 40), "bfloat16"),
    "attention/s5_backward": ((2, 70, 70, 40), "bfloat16"),
}
SMALL_TILES = ("s8_warp_tile", "s9_tensor_core", "s10_hopper")


@dataclass(frozen=True)
class Mutant:
    """A mistake, the check that finds it, and where it shows."""

    mistake: str
    caught: str
    changes: tuple[str, ...]  # of the rung's file, or after "@tiling/panels" of another one of kernels/cuda
    sizes: tuple[int, ...] = ()  # where the rung's usual ones don't show it


def swap(old: str, new: str) -> tuple[str]:
    """Return a change."""
    return (f"~{old} => {new}",)


def planted() -> dict[str, list[Mutant]]:
    """Return those of `planted.txt`, by rung."""
    found: dict[str, list[Mutant]] = {}
    for each in mistakes_in(Path(__file__).with_name("planted.txt"))[0]:
        caught, *sizes = each.says
        mutant = Mutant(each.name, caught, (*each.changes,), tuple(map(int, " ".join(sizes).split())))
        found.setdefault(each.part, []).append(mutant)
    return found


def built(rung: str, changes: Iterable[str], folder: Path) -> Any:
    """Return the module of a rung with these changes, and of the files of kernels/cuda that they are for.

    The copies are modules of the same package, so that their imports work; their names are the same in every
    process. Raises AssertionError where a change does not fit.
    """
    changes = tuple(changes)
    parts: dict[str, list[str]] = {rung: []}
    for line in changes:
        parts.setdefault(line[1:], []) if line[0] == "@" else parts[[*parts][-1]].append(line)
    texts = {file: (FOLDER / f"{file}.py").read_text() for file in parts}
    for file, lines in parts.items():
        try:
            texts[file] = changed(texts[file], lines)
        except ValueError as error:
            raise AssertionError(f"{file}.py {error}") from None
    number = zlib.crc32(repr((rung, changes)).encode())
    names = {file: str(Path(file).with_name(f"mutant_{number}_{Path(file).name}")) for file in texts}
    modules: dict[str, ModuleType] = {}
    for file in reversed(texts):  # the rung, which imports the others, comes last
        text = texts[file]
        for other, name in names.items():
            text = text.replace(f"from .{_dotted(other)} import", f"from .{_dotted(name)} import")
        path = folder / f"{names[file]}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{cuda.__name__}.{_dotted(names[file])}", path)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return modules[rung]


def small_tiles(rung: str, module: Any) -> None:
    """Choose tiles that compile in less time, where as much can go wrong: several warps, a full ring."""
    if rung == "s8_warp_tile":
        module.SMALL = module.LARGE = dataclasses.replace(
            module.SMALL, rows=64, columns=64, own_rows=8, own_columns=4, stages=3, blocks=1
        )
    elif rung == "s9_tensor_core":
        module.SMALL = module.BlockTile(warps_down=1, warps_across=2, warp_rows=16, stages=3)
    elif rung == "s10_hopper":
        module.COLUMNS, module.SHARED = (128,), 128 * 1024  # three slots


def forget(module: Any) -> None:
    """Take the modules that were built with this one out of Python's table of modules."""
    own = module.__name__.rpartition(".")[2].partition("_s")[0] + "_"
    for name in [name for name in sys.modules if name.rpartition(".")[2].startswith(own)]:
        del sys.modules[name]


def caught(rung: str, module: Any, mutant: Mutant) -> tuple[str, str]:
    """Return the check that a mutant does not pass in the emulator, and what it says; "" where it passes."""
    sizes, dtype = USUAL[rung]
    if mutant.caught in COUNTED:
        return caught_by_counting(module.RUNG, ALIGNED, dtype, SECTORS.get(rung, 16))
    return caught_by(module.RUNG, mutant.sizes or sizes, dtype)


def caught_by(step: Any, sizes: Iterable[int], dtype: str) -> tuple[str, str]:
    """Return the check that a result of these sizes does not pass, and what it says; "" where it passes."""
    first, *others = sizes  # m, or heads
    rng = np.random.default_rng()
    try:
        with np.errstate(invalid="ignore"):
            if isinstance(step, AttentionRung):
                queries, keys, width = others
                for causal in (False, True)[: 1 + (queries == keys)]:
                    attention.check(step, ((first,), queries, keys, width), causal, rng, dtype)
            else:
                n, k = others
                product_checks.check(step, first, n, k, dtype, rng)
    except Fault as fault:
        file, _, line = fault.where.rpartition(":")  # a line of the source
        has_a_place = Path(file).is_file() and int(line) > 0
        return fault.kind if has_a_place else "a fault without a place", str(fault)
    except AssertionError as error:
        return "wrong numbers", str(error)
    return "", ""


def caught_by_counting(step: Any, sizes: Iterable[int], dtype: str, sectors: float) -> tuple[str, str]:
    """As `caught_by`: banks must not conflict, and a load take `sectors` of 32 bytes at most.

    Attention, causal, of `ALIGNED_HEAD` must not move more than 1.3 times what its tiles do.
    """
    limit = float("inf")
    with profiled() as counts:
        if isinstance(step, AttentionRung):
            attention.run(step, ALIGNED_HEAD, True, dtype)
            if step.number > 2:  # which have tiles
                limit = 1.3 * attention.least_bytes(step, ALIGNED_HEAD, True, dtype)
        else:
            m, n, k = sizes
            step.matmul(*product_checks.inputs(m, n, k, dtype, seed=0))
    if counts.shared_conflicts:
        return "bank conflicts", str(counts)
    if counts.sectors_per_load > sectors:
        return "uncoalesced", str(counts)
    if counts.moved > limit:
        return "moves too much", f"{counts.moved} bytes, not {limit:.0f}"
    return "", ""


def _dotted(file: str) -> str:
    return file.replace("/", ".")
