"""The command `minidist doctor --gpu`: will the CUDA ladder run on this machine's GPU, and what is missing?

>>> minidist doctor --gpu

It prints one block, to read before a first run and to send back with the results.
"""

from __future__ import annotations

import platform

from rich.console import Console

from minidist.benchmarks.harness import machine
from minidist.cli.doctor_parts import MachinePart

NEEDED = ("torch", "GPU", "numba-cuda", "NVVM", "NVRTC", "nvJitLink", "CUDA ladder", "pytest-benchmark")
PACKAGES = ("numpy", "numba", "typer")


def needed(parts: list[MachinePart]) -> list[MachinePart]:
    """Choose the parts without which `minidist bench cuda` does not run."""
    return [part for part in parts if part.name in NEEDED]


def show(console: Console, parts: list[MachinePart]) -> None:
    """Print whether the ladder will run with these parts, then each part, with a remedy if it is missing."""
    runs = all(part.ok for part in parts)
    headline = "The CUDA ladder will run here." if runs else "The CUDA ladder will not run on a GPU here."
    if not runs and all(part.ok or not part.looked for part in parts):
        headline = "It is not known whether the CUDA ladder will run here."
    console.print(headline, style="green" if runs else "yellow")
    versions = ", ".join(f"{name} {machine.version(name) or 'missing'}" for name in PACKAGES)
    lines = [("Python", f"{platform.python_version()}, {versions}")]
    for part in parts:
        lines.append((part.name, part.found if part.ok else f"{part.found}; remedy: {part.remedy}"))
    for name, text in lines:
        console.print(f"  {name:<17} {text}", highlight=False, markup=False, soft_wrap=True)
