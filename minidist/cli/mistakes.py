"""The command `minidist mistakes`: which detector finds which mistake of parallel training.

minidist mistakes
minidist mistakes --show backward-adds-again
"""

from __future__ import annotations

from typing import Annotated

import typer

from minidist._names import unknown
from minidist.cli.options import Debug, Json
from minidist.cli.output import print_json, show


def mistakes(
    names: Annotated[
        list[str] | None, typer.Argument(help="Mistakes, or classes of them; default: all.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only name them, each with its symptom.")] = False,
    shown: Annotated[
        str | None, typer.Option("--show", metavar="NAME", help="One mistake: its lines, and what finds it.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Try mistakes that people make in parallel training, and show which detector finds them.

    Each is a few changed lines of a rung of the training ladder. The loss misses many. All of them take a
    minute or two. Seconds are those of the processor.
    """
    from minidist.plain.mistakes import CLASSES, collection

    known = collection()
    wanted = [shown] if shown else names or CLASSES
    for name in wanted:
        if name not in (*CLASSES, *known):
            raise unknown("mistake", name, [*CLASSES, *known])
    if shown in CLASSES:
        own = ", ".join(each.name for each in known.values() if each.kind == shown)
        raise ValueError(f"{shown} is a class of mistakes; show one of {own}")
    chosen = [each for each in known.values() if {each.name, each.kind} & {*wanted}]
    if listed:
        show("\n".join(f"{each.kind:<12}{each.name:<36}{each.symptom}" for each in chosen))
        return
    import torch

    from minidist.plain.mistakes.examine import DETECTORS, examine

    torch.set_num_threads(1)
    heads = [f"{name:^12}" for name in DETECTORS]
    if not as_json:
        show(str(known[shown]) if shown else f"{'':<36}{''.join(heads)} seconds")
    found = {}
    for each in chosen:
        of = found[each.name] = examine(each)
        marks = "".join(f"{'x' if one.sentence else '':^12}" for one in of.values())
        if shown and not as_json:
            show("\n".join(f"{name:<12}{one.sentence or '-'}" for name, one in of.items()))
        elif not as_json:
            show(f"{each.name:<36}{marks}{sum(one.seconds for one in of.values()):>8.1f}")
    if as_json:
        print_json({name: {key: one._asdict() for key, one in of.items()} for name, of in found.items()})
    elif not shown:
        sums = [sum(of[name].seconds for of in found.values()) for name in DETECTORS]
        show(f"{'seconds':<36}{''.join(f'{each:^12.1f}' for each in sums)}{sum(sums):>8.1f}")
        show(f"The loss misses {sum(not of['loss'].sentence for of in found.values())} of {len(found)}.")
