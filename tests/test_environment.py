"""conda's environment.yml and pip's constraints.txt say what pyproject.toml says.

pyproject.toml leads. environment.yml has the same packages under conda's names with the same bounds; a pin in
constraints.txt lies within the bounds, and is installable on every Python that the project takes.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"torch": "pytorch", "ml-dtypes": "ml_dtypes"}
# What conda adds: an extra of a package that is a package there, and what installs the project itself.
CONDA_EXTRAS = {"numba-cuda[cu13]": {"cuda-version": "=13"}}
TIGHTEST = {">=": max, "<": min}
PIP_ONLY = {"deploy", "peers"}
"""Extras that a conda environment takes from pip: some of their packages may not be on its channel."""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def requirements(pyproject: dict, without: set[str] = PIP_ONLY) -> list[Requirement]:
    """What the project and its extras ask for, but for the extras in `without`."""
    parts = pyproject["project"]
    extras = [group for name, group in parts["optional-dependencies"].items() if name not in without]
    return [Requirement(text) for group in (parts["dependencies"], *extras) for text in group]


def bounds(pyproject: dict) -> dict[str, str]:
    """By package, the tightest bounds of all that the project and its extras ask for: ">=1.26,<2.5"."""
    found: dict[str, dict[str, list[Version]]] = {}
    for requirement in requirements(pyproject):
        asked = found.setdefault(canonicalize_name(requirement.name), {})
        for bound in requirement.specifier:
            assert bound.operator in TIGHTEST, f"{requirement}: only >= and < are compared"
            asked.setdefault(bound.operator, []).append(Version(bound.version))
    return {
        name: ",".join(f"{each}{TIGHTEST[each](asked[each])}" for each in TIGHTEST if each in asked)
        for name, asked in found.items()
    }


def disagreements(pyproject: dict, conda: dict) -> list[str]:
    """What environment.yml has too little, too much or otherwise, as sentences."""
    lines = [line for line in conda["dependencies"] if isinstance(line, str)]
    there = dict(re.fullmatch(r"([\w.-]+) *(.*)", line).groups() for line in lines)
    wanted = {"python": pyproject["project"]["requires-python"], "pip": ""}
    wanted |= {CONDA_NAMES.get(name, name): bound for name, bound in bounds(pyproject).items()}
    for requirement in requirements(pyproject):
        for extra in requirement.extras:
            wanted |= CONDA_EXTRAS[f"{requirement.name}[{extra}]"]
    found = [f"{name}{bound} is missing" for name, bound in wanted.items() if name not in there]
    found += [f"{name} is not in pyproject.toml" for name in there if name not in wanted]
    found += [
        f"{name} is {there[name] or 'unbounded'}, and {bound or 'unbounded'} in pyproject.toml"
        for name, bound in wanted.items()
        if name in there and there[name] != bound
    ]
    return found


def test_environment_says_what_pyproject_says():
    assert disagreements(project(), environment()) == []


def test_environment_installs_the_project_itself():
    (pip,) = [line["pip"] for line in environment()["dependencies"] if isinstance(line, dict)]
    assert pip == ["--editable ."]
    assert environment()["channels"] == ["conda-forge"]


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("rich>=13.7", None, "rich>=13.7 is missing"),
        ("rich>=13.7", ["rich>=13.7", "scipy>=1.0"], "scipy is not in pyproject.toml"),
        ("cuda-version=13", None, "cuda-version=13 is missing"),
        ("pytorch>=2.11", ["pytorch>=2.4"], "pytorch is >=2.4, and >=2.11 in pyproject.toml"),
        ("ruff>=0.9", ["ruff"], "ruff is unbounded, and >=0.9 in pyproject.toml"),
    ],
)
def test_a_planted_disagreement_is_found(line, instead, says):
    conda = environment()
    at = conda["dependencies"].index(line)
    conda["dependencies"][at : at + 1] = instead or []
    assert disagreements(project(), conda) == [says]


def test_the_tightest_bound_counts():
    assert bounds(project())["numba"] == ">=0.66"
    assert bounds(project())["numpy"] == ">=1.26"
    pyproject = project()
    pyproject["project"]["optional-dependencies"]["bench"].append("numba>=0.67")  # more than the project
    assert bounds(pyproject)["numba"] == ">=0.67"
    pyproject["project"]["optional-dependencies"]["bench"].append("numpy<2.4")
    assert bounds(pyproject)["numpy"] == ">=1.26,<2.4"
    pyproject["project"]["optional-dependencies"]["bench"].append("numpy<2.6")  # and for no more than that
    assert bounds(pyproject)["numpy"] == ">=1.26,<2.4"


def misfits(pyproject: dict, lines: list[str]) -> list[str]:
    """Pins that are out of the project's bounds, or that a Python which the project takes can't install."""
    asked = {}
    for requirement in requirements(pyproject, without=set()):
        name = canonicalize_name(requirement.name)
        asked[name] = asked.get(name, SpecifierSet()) & requirement.specifier
    oldest = re.fullmatch(r">=(3\.\d+)", pyproject["project"]["requires-python"])[1]
    found = []
    for line in lines:
        pin = Requirement(line)
        (exact,) = pin.specifier
        name = canonicalize_name(pin.name)
        if exact.operator != "==":
            found.append(f"{line}: not a pin")
        elif name not in asked:
            found.append(f"{line}: pyproject.toml does not ask for it")
        elif not asked[name].contains(exact.version):
            found.append(f"{line}: pyproject.toml asks for {asked[name]}")
        elif pin.marker is None or pin.marker.evaluate({"python_version": oldest}):
            needs = requires_python(name, exact.version)
            if not SpecifierSet(needs).contains(f"{oldest}.0"):
                found.append(f"{line}: needs Python {needs}; pin it for those alone, with a marker")
    return found


def requires_python(name: str, version: str) -> str:
    """What a release says of Python, as far as it is installed here; otherwise nothing is known."""
    try:
        found = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found.get("Requires-Python", "") if found["Version"].partition("+")[0] == version else ""


def test_constraints_fit_the_project():
    assert misfits(project(), pins()) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("rich==13.0", "rich==13.0: pyproject.toml asks for >=13.7"),
        ("scipy==1.17.1", "scipy==1.17.1: pyproject.toml does not ask for it"),
        ("rich>=13.7", "rich>=13.7: not a pin"),
    ],
)
def test_a_planted_misfit_is_found(line, why):
    assert misfits(project(), [line]) == [why]
