"""What a newcomer reads in a weekend: the files that docs/architecture.md lists."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minidist.plain import LADDER
from tests.helpers.links import names_in

ROOT = Path(__file__).parent.parent


def listed() -> list[str]:
    """The files that the map links to under "Read it in a weekend", in order."""
    path = ROOT / "docs/architecture.md"
    [section] = re.findall(
        r"^#+ Read it in a weekend\n(.*?)(?=^#+ )", path.read_text(), re.MULTILINE | re.DOTALL
    )
    links = [(path.parent / link).resolve() for link in re.findall(r"\]\(([^)]+\.py)\)", section)]
    return [str(link.relative_to(ROOT)) for link in links if ROOT / "tests" not in link.parents]


FILES = listed()

INTERFACES = {
    # What the files import beside each other: module, names, and why a reader need not open it.
    "minidist.comm": (
        "all_gather all_reduce all_to_all broadcast rank recv reduce_scatter send size Work",
        "the collectives, whose meaning and bytes minidist/plain/__init__.py gives",
    ),
    "minidist._names": ("unknown", "makes the error for a name that is not in a table"),
    "minidist.model.configs": ("GPTConfig", "a GPT's sizes: vocabulary, layers, heads, width, dropout, tied"),
    "minidist.model.mixture_of_experts": (
        "MixtureOfExperts",
        "takes the place of a block's MLP if the config has experts, as the rung `experts` explains",
    ),
    "minidist.kernels": ("Rung rung", "Rung is the same as rung.Rung, and rung looks one up by its name"),
    "minidist.kernels.rung": (
        "Array Rung Step empty",
        "a rung is a number, a name, an idea and compute(a, b, out); its checks are for callers' mistakes",
    ),
    "minidist.kernels.cpu.support.compiling": ("compiled", "numba.njit at the first call, kept on disk"),
    "minidist.kernels.cpu.support.caches": ("caches", "the sizes of this machine's caches, in bytes"),
    "minidist.kernels.cpu.support.vector_unit": (
        "vector_unit",
        "this machine's vector registers: elements in one, rows of the tile that fit",
    ),
    "minidist.kernels.cpu.support.thread_pool": (
        "HELP PATIENCE address begin board clear end latest serve threads wake",
        "wake(helpers, serve) wakes threads that call serve(); clear() and end() wait for them",
    ),
    "minidist.kernels.cpu.support.board": (
        "array close cut join leave take",
        "memory in which a product is posted, with the counters that deal out its parts",
    ),
    "minidist.kernels.cpu.support.small_products": (
        "in_columns multiply way",
        "products that are too small or thin to be packed",
    ),
    "minidist.kernels.cpu.support.one_thread": ("compute", "rung 6's product in one thread"),
    "minidist.kernels.cpu.support.shared_packing": (
        "multiply_packed pack_together place post",
        "packs b together with other threads, says where a part of out lies, and multiplies",
    ),
    "minidist.kernels.cuda.cuda_rung": ("CudaRung", "a Rung that takes arrays in a GPU's memory, too"),
    "minidist.kernels.cuda.runtime.kernel": (
        "Kernel",
        "compiles a function and launches it, on a GPU or in the emulator",
    ),
    "minidist.kernels.cuda.runtime.matrix": (
        "Matrix StorageOrder",
        "element (i, j) is data[i * row_stride + j * column_stride]",
    ),
    "minidist.kernels.cuda.instructions.copies": (
        "load_128 store_128",
        "one instruction that moves 16 bytes between an array in registers and memory",
    ),
    "minidist.kernels.cuda.tiling.packing": (
        "packed",
        "the matrix itself, or a copy whose rows begin and end on 16 bytes",
    ),
    "minidist.kernels.cuda.tiling.panels": (
        "ALIGNMENT Function inlined store_four stores_vectors",
        "device functions that are inlined, and the store of four neighbours of c",
    ),
}


def module_name(file: str) -> str:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("minidist") else f"minidist.{name}"


def imports_of(file: str, text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, also inside functions and for type checkers; name "" for a module."""
    package = module_name(file).rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                known = inner in INTERFACES or inner in map(module_name, FILES)
                yield (inner, "") if known else (base, alias.name)


def unnamed(file: str, text: str) -> list[str]:
    """What a file with this text takes of the project that is neither in the list nor a named interface."""
    found = []
    for module, name in imports_of(file, text):
        top = module.partition(".")[0]
        if top != "minidist":
            assert top in sys.stdlib_module_names or importlib.util.find_spec(top), f"{file}: {module}"
        elif module in INTERFACES:
            used = {name} if name else {*re.findall(rf"\b{module.rpartition('.')[2]}\.(\w+)", text)}
            used -= {"py"}  # `packed_product.py`, in a docstring
            found += [f"{module}.{one}" for one in sorted(used - {*INTERFACES[module][0].split()})]
        elif module not in map(module_name, FILES):
            found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_a_page_or_two_and_leads_to_no_other_book(file: str) -> None:
    text = (ROOT / file).read_text()
    assert len(text.splitlines()) <= 150
    assert not unnamed(file, text)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("from minidist.parallel.sharding.loops import zero", ["minidist.parallel.sharding.loops.zero"]),
        ("import minidist.model.data", ["minidist.model.data."]),
        ("from .compiling import _checksum", ["minidist.kernels.cpu.support.compiling._checksum"]),
        ("from . import board\nboard.clear()", ["minidist.kernels.cpu.support.board.clear"]),
        ("from . import caches, register_tile", []),
    ],
)
def test_an_import_that_is_not_named_is_found(planted: str, found: list[str]) -> None:
    file = "kernels/cpu/support/block_sizes.py"
    function = "\n    ".join(["def planted():", *planted.splitlines()])
    assert unnamed(file, f"{(ROOT / file).read_text()}\n{function}\n") == found


def test_the_whole_is_read_in_a_weekend() -> None:
    assert sum(len((ROOT / file).read_text().splitlines()) for file in FILES) <= 4000
    assert len({*FILES}) == len(FILES)


def test_no_rung_is_left_out() -> None:
    """CPU rung 8, and GPU rungs from 7 on, need the hardware's own instructions: not for a weekend."""
    rungs = {f"kernels/cpu/{path.name}" for path in ROOT.glob("kernels/cpu/s[1-7]_*.py")}
    rungs |= {f"kernels/cuda/{path.name}" for path in ROOT.glob("kernels/cuda/s[1-6]_*.py")}
    rungs |= {f"minidist/plain/{path.name}" for path in ROOT.glob("minidist/plain/*.py")}
    rungs -= {"minidist/plain/placements.py"}  # no rung: it looks for mistakes in them
    assert rungs <= {*FILES}
    assert [file for file in FILES if Path(file).stem in LADDER and "plain" in file] == [
        f"minidist/plain/{rung}.py" for rung in LADDER
    ]


@pytest.mark.parametrize("module", INTERFACES)
def test_an_interface_is_there_and_needed(module: str) -> None:
    names = INTERFACES[module][0].split()
    file = ROOT / f"{module.removeprefix('minidist.').replace('.', '/')}.py"
    if "kernels." in module:
        assert {*names} <= names_in(file)
    else:
        assert all(hasattr(importlib.import_module(module), name) for name in names)
    text = "\n".join((ROOT / file).read_text() for file in FILES)
    assert all(re.search(rf"\b{name}\b", text) for name in names)
