"""Draw the two pictures of README and site: `python docs/pictures.py`. They are computed, not measured."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from minidist import Layout
from minidist.parallel import schedules
from minidist.scale.memory import estimate, plot

FOLDER = Path(__file__).parent / "pictures"
LAYOUTS = {
    "data\nparallel": Layout(dp=8, precision="bf16", recompute=True),
    "ZeRO-1": Layout(dp=8, zero=1, precision="bf16", recompute=True),
    "ZeRO-2": Layout(dp=8, zero=2, precision="bf16", recompute=True),
    "ZeRO-3": Layout(dp=8, zero=3, precision="bf16", recompute=True),
    "tensor\nparallel": Layout(tp=8, precision="bf16", recompute=True),
    "pipeline": Layout(pp=8, micro_batches=8, precision="bf16", recompute=True),
}


def main() -> None:
    """Write memory.svg and schedule.svg; the same bytes in every run."""
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "minidist", "svg.fonttype": "path"}):
        estimates = {name: estimate("gpt2-xl", layout, batch=(8, 1024)) for name, layout in LAYOUTS.items()}
        memory = plot(estimates, title="GPT-2 XL on 8 ranks, bf16, layers recomputed: what a rank keeps")
        schedule = schedules.plot(schedules.one_f_one_b(ranks=4, micro_batches=8))
        for name, axes in (("memory", memory), ("schedule", schedule)):
            axes.figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
