"""Draw the pictures of README and site: `python docs/pictures.py`. They are computed, not measured.

A code host runs no scripts. So it shows one frame of each animation that the site shows whole. The pictures
of moving_pictures.py move without a script.
"""

from __future__ import annotations

import html
import importlib
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib

from minidist import Layout
from minidist.scale.memory import estimate, plot
from minidist.scale.memory.largest_batch import sharded

FOLDER = Path(__file__).parent / "pictures"
LAYOUTS = {
    "data\nparallel": Layout(dp=8, precision="bf16", recompute=True),
    **sharded(Layout(precision="bf16", recompute=True), 8),
    "tensor\nparallel": Layout(tp=8, precision="bf16", recompute=True),
    "pipeline": Layout(pp=8, micro_batches=8, precision="bf16", recompute=True),
}
STILLS = {
    "data_parallel_step.data_parallel_step": 4,
    "layouts.mesh_animation": 0,
    "ring.ring_animation": 4,
    "sharded_layers.sharded_layers": 11,
    "shared_layers.shared_mlp": 0,
}
"""Functions of lessons/checks/pictures, and the frame that is drawn."""


def main(folder: Path = FOLDER) -> None:
    """Write memory.svg, and a file for each of STILLS and of FILMS; the same bytes in every run."""
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "minidist", "svg.fonttype": "path"}):
        estimates = {name: estimate("gpt2-xl", layout, batch=(8, 1024)) for name, layout in LAYOUTS.items()}
        memory = plot(estimates, title="GPT-2 XL on 8 ranks, bf16, layers recomputed: what a rank keeps")
        memory.figure.savefig(folder / "memory.svg", metadata={"Date": None})
    for name, frame in STILLS.items():
        module, _, function = name.partition(".")
        (folder / f"{function}.svg").write_text(still(module, function, frame))
    for film in runpy.run_path(os.fspath(Path(__file__).parent / "moving_pictures.py"))["FILMS"]:
        (folder / f"{film.__name__}.svg").write_text(film())


def still(module: str, function: str, frame: int) -> str:
    """A picture of the lessons as a file of its own: black on white, and below it what its frame says."""
    shown: list[Any] = []

    def take(what: Any, *_: Any, **__: Any) -> None:
        shown.append(what)

    lessons = os.fspath(Path(__file__).parent.parent / "lessons")
    with mock.patch.object(sys, "path", [lessons, *sys.path]):
        drawing = importlib.import_module(f"checks.pictures.{module}")
    with mock.patch.multiple(drawing, create=True, animate=take, show=take):
        getattr(drawing, function)()
    [picture] = shown
    svg, note = (picture, "") if isinstance(picture, str) else (picture.svg(frame), picture.note(frame))
    svg = re.sub(r"<g data-block=[^>]*opacity: 0;.*?</g>", "", svg)
    wide, high = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    below = 28 if note else 0
    words = f'<text x="8" y="{high + 18}" font-size="13" fill="currentColor">{html.escape(note)}</text>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high + below}" width="{wide}" '
        f'height="{high + below}" font-family="system-ui, sans-serif" style="background: white">'
    )
    return re.sub("<svg [^>]*>", head, svg, count=1).replace("</svg>", f"{words if note else ''}</svg>\n")


if __name__ == "__main__":
    main()
