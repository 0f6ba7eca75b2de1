"""Random questions to the playground, about complete and broken schedules, and the library's answers."""

from __future__ import annotations

import random
from typing import Any

from minidist.parallel import schedules
from minidist.parallel.schedules import Instruction, Schedule
from minidist.parallel.schedules.instructions import PlacedSchedule, only
from minidist.parallel.schedules.schedule_proof import Deadlock


def written(schedule: Schedule) -> str:
    """A schedule as a person types it."""
    stages = schedule.placement.stages if isinstance(schedule, PlacedSchedule) else ()
    first = f"stages {', '.join(' '.join(map(str, own)) for own in stages)}\n" if stages else ""
    return first + "\n".join(
        " ".join(str(each).replace(" of chunk ", ".") for each in own) for own in schedule
    )


def changed(schedule: list[list[Instruction]], draw: random.Random) -> None:
    """Change one rank's list, which may or may not break the schedule."""
    own = draw.choice(schedule)
    i, j = draw.randrange(len(own)), draw.randrange(len(own))
    match draw.choice(["swap", "swap", "move", "early", "drop", "double", "other"]):
        case "swap":
            own[i], own[j] = own[j], own[i]
        case "move":
            own.insert(min(i + 1, len(own) - 1), own.pop(i))
        case "early":  # the first backward pass right after the first forward pass: others may wait for ever
            backward = next(k for k, each in enumerate(own) if each.kind.startswith("backward"))
            forward = next(k for k, each in enumerate(own) if each.kind == "forward")
            own.insert(forward + 1, own.pop(backward))
        case "drop":
            own.pop(i)
        case "double":
            own.insert(j, own[i])
        case _:
            own[i] = Instruction(own[j].kind, own[i].micro_batch, own[j].chunk)


def cases(count: int) -> list[tuple[dict[str, Any], Schedule, dict[str, float]]]:
    """Requests, each with the schedule and the times that it means. Some schedules are broken."""
    made = []
    for seed in range(count):
        draw = random.Random(seed)
        name = draw.choice([*schedules.SCHEDULES])
        ranks, micro_batches = draw.randint(1, 6), draw.randint(1, 9)
        least, most = schedules.SCHEDULES[name].chunks
        chunks = draw.randint(least, most or least + 1) if least > 1 else 1
        schedule = schedules.by_name(name, ranks, micro_batches, chunks)
        text = ""
        if typed := draw.random() < 0.7:
            name = ""
            if draw.random() < 0.5:  # without messages; the page puts them in
                schedule = only(schedule, lambda each: each.computes)
            if draw.random() < 0.8:
                changed(schedule, draw)
            text = written(schedule)
            if all(each.computes for own in schedule for each in own):
                schedule = schedules.with_messages(schedule)
        times = {kind: draw.choice([0.0, 0.25, 1.0, draw.random()]) for kind in ("backward_input", "message")}
        times |= {"forward": draw.random(), "backward_weight": draw.choice([0.5, draw.random()])}
        request = {"schedule": name, "ranks": ranks, "micro_batches": micro_batches, "chunks": chunks}
        request |= {"times": times, "text": text, "messages": typed, "rewrite": False}
        made.append((request, schedule, times))
    return made


def library(schedule: Schedule, times: dict[str, float]) -> dict[str, Any]:
    """What the library says of a schedule."""
    try:
        found = schedules.simulate(schedule, times)
    except Deadlock as error:
        waiting = [[rank, str(each), source] for rank, (each, source) in error.waiting.items()]
        return {"error": str(error), "waiting": waiting, "timeline": drawn(error.timeline)}
    except ValueError as error:
        return {"error": str(error)}
    timeline = drawn(found.timeline)
    numbers = ("seconds", "bubble", "bubbles", "peak_activations")
    return rounded({**{name: getattr(found, name) for name in numbers}, "timeline": timeline})


def drawn(timeline: Any) -> list[list[list[Any]]]:
    """A timeline as the playground writes it."""
    return [
        [[str(each)[0], each.micro_batch, each.chunk, start, end] for each, start, end in events]
        for events in timeline
    ]


def rounded(said: dict[str, Any]) -> dict[str, Any]:
    """Without the last digits of bubbles: `sum` of floats is more exact from Python 3.12 on."""
    said = {name: value for name, value in said.items() if name not in ("text", "sizes")}
    if "error" not in said:
        said |= {
            "bubble": round(said["bubble"], 12),
            "bubbles": [round(each, 12) for each in said["bubbles"]],
        }
    return said
