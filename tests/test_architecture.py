"""The map is true and the floors hold: names in docs/architecture.md exist, and a wrong import is found."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.clocks import HANG
from tests.helpers.links import named_in, names_in

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
NAMED = named_in(PAGE.read_text())
PACKAGES = ("minidist", "kernels", "benchmarks")


def test_the_map_follows_every_strategy() -> None:
    assert len(NAMED) > 60


@pytest.mark.parametrize("path", sorted({path for _, path in NAMED}))
def test_what_the_map_names_is_there(path: str) -> None:
    assert (ROOT / path).is_file()
    assert {name for name, file in NAMED if file == path} <= names_in(ROOT / path)


@pytest.mark.parametrize(
    "package", ["minidist", "minidist.cli", "minidist.comm", "minidist.comm.algorithms", "minidist.model"]
)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert dir(module) == module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


PUBLIC = {  # import paths that lessons and people's programs use
    "minidist.parallel.schedules": "by_name check gpipe interleaved one_f_one_b simulate zero_bubble",
    "minidist.parallel.tensor_parallel": "gather_sequence parallelize",
    "minidist.parallel.context_parallel": "ring_attention ring_bytes",
    "minidist.parallel.layerwise": "LayerByLayer cut measure",
    "minidist.parallel.sequence_share": "SequenceShare apply",
    "minidist.scale.memory": "estimate fits",
    "minidist.scale.planner": "Plan plan",
    "minidist.scale.step_time": "StepTime predict_step",
    "minidist.scale.dryrun": "DryRun dryrun",
    "minidist.scale.trace": "Tracer trace",
    "minidist.kernels.cuda.emulator": "Fault launch profile profiled",
    "minidist.kernels.cuda.warp": "load_128 mma_m16n8k16_f16 uniform",
    "minidist.kernels.roofline": "attainable intensity measure",
    "minidist.kernels.systolic": "SystolicArray compare cycles",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_import_paths_have_their_names(module: str) -> None:
    """The names are no modules, whatever else has been imported of the package."""
    found = importlib.import_module(module)
    for inside in pkgutil.iter_modules(getattr(found, "__path__", [])):
        if inside.name != "__main__":
            importlib.import_module(f"{module}.{inside.name}")
    assert [name for name in PUBLIC[module].split() if not callable(getattr(found, name))] == []


def test_every_package_names_its_files() -> None:
    """The `__init__.py` of a package is its map: it names each file beside it."""
    missing = []
    for init in [*ROOT.glob("minidist/**/__init__.py"), *ROOT.glob("kernels/**/__init__.py")]:
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        files = [path for path in init.parent.glob("*.py") if not path.stem.startswith("_")]
        missing += [str(path.relative_to(ROOT)) for path in files if path.stem not in text]
    assert not missing


def named_in_tables(init: Path) -> set[tuple[Path, str]]:
    """The names in a package's tables, `| file.py | `Name`: ... |` and `| Where ... | `Name` | file.py |`."""
    found = set()
    for line in (ast.get_docstring(ast.parse(init.read_text())) or "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[2].endswith(".py"):
            found |= {(init.parent / cells[2], name) for name in re.findall(r"`([\w.]+)`", cells[1])}
        elif line.startswith("|") and re.fullmatch(r"[\w./]+\.py", cells[0]):
            found |= {(init.parent / cells[0], name) for name in re.findall(r"`([A-Za-z_][\w.]*)`", cells[1])}
    return found


def test_names_in_package_docstrings_exist(tmp_path: Path) -> None:
    inits = [*ROOT.glob("minidist/**/__init__.py"), *ROOT.glob("kernels/**/__init__.py")]
    named = set[tuple[Path, str]]().union(*map(named_in_tables, inits))
    assert len(named) > 100
    assert [each for each in sorted(named) if each[1] not in names_in(each[0])] == []
    (tmp_path / "__init__.py").write_text('"""| Where? | `Gone.there` | here.py |\n| here.py | `gone` |"""')
    here = tmp_path / "here.py"
    assert named_in_tables(tmp_path / "__init__.py") == {(here, "Gone.there"), (here, "gone")}


def lint(folder: Path) -> str:
    """What import-linter says of the package in `folder`; "" where every contract is kept."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {program}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


PLANTED = [  # a file, a module that it may not import, and the name of a contract that says so
    ("minidist/parallel/flat/buckets.py", "minidist.parallel.engine.prepare", "Strategies, from the top"),
    ("minidist/comm/errors.py", "minidist.model.gpt", "The house, from the top"),
    ("minidist/model/loss.py", "minidist.scale.memory", "The house, from the top"),
    ("kernels/rung.py", "minidist.comm.errors", "The house, from the top"),
    ("kernels/cpu/s4_loop_order.py", "minidist.kernels.cpu.s3_compiled", "No rung imports another rung"),
    ("minidist/comm/algorithms/ring.py", "minidist.comm.world", "Communication, from the top"),
    ("minidist/plain/overlap.py", "minidist.model.gpt", "The training ladder imports communication alone"),
    ("minidist/plain/overlap.py", "minidist.plain.buckets", "No rung of the training ladder imports another"),
]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the package with the contracts."""
    for name in PACKAGES:
        to = tmp_path / (name if name == "minidist" else f"minidist/{name}")
        shutil.copytree(
            ROOT / name, to, ignore=shutil.ignore_patterns("__pycache__", "kernels", "benchmarks", "results")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_import_leads_to_a_lower_floor(house: Path) -> None:
    assert lint(house) == ""


def test_imports_from_a_lower_floor_to_a_higher_one_are_found(house: Path) -> None:
    """Also an import inside of a function, as all planted ones are. Each is named under its own contract."""
    for file, planted, _ in PLANTED:
        there = house / (file if file.startswith("minidist") else f"minidist/{file}")
        there.write_text(f"{there.read_text()}\n\ndef planted() -> None:\n    import {planted}  # noqa\n")
    sections = re.split(r"\n(?=[^\n]+\n-+\n)", lint(house))
    for file, planted, contract in PLANTED:
        module = file.removesuffix(".py").replace("/", ".")
        line = f"{module if module.startswith('minidist') else f'minidist.{module}'} -> {planted} "
        assert any(text.startswith(contract) and line in text for text in sections), line
