"""The page of mistakes, made of the collection and of what detectors find of it.

To write it anew, which takes a minute or two: python docs/mistakes.py
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import torch

from minidist.plain.mistakes import CLASSES, collection
from minidist.plain.mistakes.examine import DETECTORS, Found, examine

PAGE = Path(__file__).with_suffix(".md")
BEGIN = "# Mistakes that the loss does not show\n"
OWN = """
## In your own training

`detect` asks all but the last two about a training of any library. Give it two functions that train from the
same weights on the same global batches: on ranks, and in one process. Each takes a function that makes an
optimizer and a number of steps, and returns the losses and all parameters by name.

```python
from functools import partial

import torch
import torch.distributed as dist
from minidist.parallel.debugging.detectors import detect
from torch.nn.parallel import DistributedDataParallel


def train(ranks, make_optimizer, steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).double()
    trained = model if ranks == 1 else DistributedDataParallel(model)
    optimizer, losses = make_optimizer(model.parameters()), torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        rows = torch.randn(6, 8).double().chunk(ranks)[0 if ranks == 1 else dist.get_rank()]
        loss = trained(rows).square().sum()  # the mistake: DDP takes the mean of the ranks' sums
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    if ranks > 1:
        dist.all_reduce(losses)
    return losses.tolist(), dict(model.named_parameters())


if __name__ == "__main__":
    for name, found in detect(partial(train, 2), partial(train, 1), ranks=2).items():
        print(name, found.sentence or "nothing")
```

It says `the gradient of weight differs by 0.5 of its size on rank 0`, which the loss does not show.

The [tests](../tests/parallel/debugging/test_detectors.py) do so with torch's DDP, FSDP2 and tensor
parallelism, and plant a mistake in each.
"""


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


def marks(found: dict[str, Found]) -> Sequence[str]:
    """A mark for each detector that finds the mistake."""
    return ["x" if one.sentence else "" for one in found.values()]


def page(found: dict[str, dict[str, Found]]) -> str:
    """The page, without the seconds."""
    known = collection()
    missed = sum(not of["loss"].sentence for of in found.values())
    placed = sum(bool(of["placements"].sentence) for of in found.values())
    text = f"""{BEGIN}
Parallel training fails silently: the loss goes down, and something is wrong. Here are {len(found)} mistakes
that people make. Each is a few changed lines of a page of the [training ladder](ladders/training.md), or of a
[recipe](../minidist/plain/mistakes/recipe.py) that adds to it epochs, padding, dropout, bfloat16, clipping
and checkpoints. The loss after 100 steps, which most people look at, misses {missed} of them.
[Placements](../minidist/plain/placements.py) find {placed} before anything is sent.
[Lesson 16](../lessons/16_silent_bugs.ipynb) is a game: you hunt six of them, and name and mend the line.

```
minidist mistakes                              # this table, on your machine
minidist mistakes --show backward-adds-again   # its lines, what a user saw, and what each detector says
```

## What finds them

A [detector](../minidist/parallel/debugging/detectors.py) sees runs on two ranks, and what they have to equal.

"""
    text += row("Detector", "What it asks for") + row("---", "---")
    for name, detector in DETECTORS.items():
        about = " ".join((inspect.getdoc(detector) or "").split())
        text += row(name, about.rstrip("."))
    text += (
        "\n## Which detector finds which mistake\n\n"
        + row("", *DETECTORS)
        + row(*["---"] * (len(DETECTORS) + 1))
    )
    for name, of in found.items():
        text += row(name, *marks(of))
    text += OWN
    for kind in CLASSES:
        text += f"\n## {kind.capitalize()}\n\n[The changed lines](../minidist/plain/mistakes/{kind}.diff)\n\n"
        text += row("Mistake", "Rung", "What a user saw", "Published") + row(*["---"] * 4)
        for each in known.values():
            if each.kind == kind:
                text += row(each.name, each.rung, each.symptom, each.case)
    return text


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    found = {}
    for name, mistake in collection().items():
        found[name] = examine(mistake)
        print(name, sum(one.seconds for one in found[name].values()), flush=True)
    seconds = [sum(of[name].seconds for of in found.values()) for name in DETECTORS]
    costs = ", ".join(f"{name} {each:.1f}" for name, each in zip(DETECTORS, seconds, strict=True))
    measured = (
        f"\nSeconds of a processor for all mistakes, beside other work, on an AMD EPYC (Zen 5): {costs}."
    )
    measured += " A training counts for the first detector that looks at it.\n"
    before, middle, after = page(found).partition("\n## In your own training\n")
    PAGE.write_text(before + measured + middle + after)


if __name__ == "__main__":
    main()
