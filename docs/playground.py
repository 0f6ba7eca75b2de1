"""The playground's answers: a question about a schedule in, its verdict, times and passes out, all as JSON.

The page runs this file in the browser, by Pyodide, with the library's own sources. So it says of a schedule
what `schedules.simulate` says, which checks it first.

In the page's text each line is a rank's list: F0 is the forward pass of micro-batch 0, and F0.1 that through
chunk 1. The other letters, and the messages (recv F0, send F0), are those of `str(Instruction)`. Commas and
small letters are read too. Where stages are not placed round robin, a first line names those of each rank:
"stages 0 3, 1 2".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from minidist.parallel import schedules
from minidist.parallel.schedules import Instruction, Schedule, StagePlacement
from minidist.parallel.schedules.instructions import KINDS, PlacedSchedule, sizes
from minidist.parallel.schedules.schedule_proof import Deadlock
from minidist.parallel.schedules.simulation import DRAWN

SHORT = {kind: str(Instruction(kind, 0))[:-1] for kind in KINDS}  # "forward": "F", "recv_forward": "recv F"
KINDS_BY_SHORT = {short: kind for kind, short in SHORT.items()}
WORD = re.compile(r"(?:(?:recv|send)\s+)?[^\s,;]+", re.IGNORECASE)
INSTRUCTION = re.compile(r"((?:recv |send )?[fbiw])(\d+)(?:\.(\d+))?$", re.IGNORECASE)


def choices() -> str:
    """The schedules to choose from, with their least number of chunks, and the passes' names and colours."""
    kinds = {name: [kind.title, kind.least_chunks] for name, kind in schedules.SCHEDULES.items()}
    return json.dumps({"schedules": kinds, "passes": [[SHORT[kind], *DRAWN[kind]] for kind in DRAWN]})


def answer(request: str) -> str:
    """Make or read a schedule, check it and simulate it.

    The request has "schedule" (a name, or "" to read "text"), "ranks", "micro_batches", "chunks", "times",
    "messages" (whether to write them in the text) and "rewrite" (whether to write a text that was read). The
    answer has "text" with "error", or with "sizes", "timeline" and the numbers of a `Simulation`. Where ranks
    wait for ever, it has the "timeline" up to then, and "waiting": rank, instruction and the rank waited for.
    """
    asked = json.loads(request)
    text = asked["text"]
    try:
        if asked["schedule"]:
            sizes_asked = (asked[name] for name in ("ranks", "micro_batches", "chunks"))
            schedule = schedules.by_name(asked["schedule"], *sizes_asked)
            text = write(schedule, asked["messages"])
        else:
            if asked["rewrite"]:
                text = write(read(text), asked["messages"])
            schedule = read(text)
        found = schedules.simulate(schedule, asked["times"])
    except Deadlock as error:
        waiting = [[rank, str(each), other] for rank, (each, other) in error.waiting.items()]
        stuck = {"waiting": waiting, "timeline": drawn(error.timeline), "sizes": sizes(schedule)}
        return json.dumps({"text": text, "error": str(error), **stuck})
    except ValueError as error:
        return json.dumps({"text": text, "error": str(error)})
    said = {
        "text": text,
        "sizes": sizes(schedule),
        "seconds": found.seconds,
        "bubble": found.bubble,
        "bubbles": found.bubbles,
        "peak_activations": found.peak_activations,
        "timeline": drawn(found.timeline),
    }
    return json.dumps(said)


def drawn(timeline: Sequence[Sequence[tuple[Instruction, float, float]]]) -> list[list[list[Any]]]:
    """For each rank its passes: letter, micro-batch, chunk, beginning and end."""
    return [
        [[SHORT[each.kind], each.micro_batch, each.chunk, start, end] for each, start, end in events]
        for events in timeline
    ]


def read(text: str) -> Schedule:
    """The schedule of a text. Where it has no message, the messages that it needs are put in."""
    schedule: list[list[Instruction]] = []
    first, _, rest = text.partition("\n")
    placement = None
    if first.lower().startswith("stages"):
        placement = StagePlacement([[*map(int, re.findall(r"\d+", own))] for own in first.split(",")])
    for rank, line in enumerate((rest if placement else text).rstrip().split("\n")):
        schedule.append([])
        for word in WORD.findall(line):
            found = instruction(word)
            if found is None:
                raise ValueError(
                    f"rank {rank} has {word!r}, which is no instruction; write F3 for the forward pass of "
                    "micro-batch 3, or F3.1 for its chunk 1; B3, I3 and W3; recv F3 and send B3"
                )
            schedule[-1].append(found)
    passes = all(each.computes for own in schedule for each in own)
    if placement is not None:
        schedule = PlacedSchedule(schedule, placement)
    return schedules.with_messages(schedule) if passes else schedule


@cache
def instruction(word: str) -> Instruction | None:
    """The instruction of a word, or None. Each is read once: an edit changes one word of hundreds."""
    found = INSTRUCTION.match(" ".join(word.split()))
    if found is None:
        return None
    short, micro_batch, chunk = found.groups()
    return Instruction(
        KINDS_BY_SHORT[f"{short[:-1].lower()}{short[-1].upper()}"], int(micro_batch), int(chunk or 0)
    )


def write(schedule: Schedule, messages: bool) -> str:
    """A schedule as text, with its messages or with its passes alone."""
    stages = schedule.placement.stages if isinstance(schedule, PlacedSchedule) else ()
    first = "stages " + ", ".join(" ".join(map(str, own)) for own in stages) + "\n" if stages else ""
    return first + "\n".join(
        " ".join(
            f"{SHORT[each.kind]}{each.micro_batch}" + (f".{each.chunk}" if each.chunk else "")
            for each in own
            if messages or each.computes
        )
        for own in schedule
    )
