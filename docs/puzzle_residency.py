"""The judge of the puzzle "who holds what": fill a table so that a model fits, with the fewest bytes sent.

The page runs this file in the browser, by Pyodide. The table has a row for each set of parameters, and says
what every rank keeps whole: a `Residency`. The planner's own formulas judge: `held_for` says what a rank
holds, `Estimate` what it needs at the fullest moment, and `Residency.bytes_sent` what it sends in a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

from minidist.model.configs import CONFIGS, TransformerConfig
from minidist.parallel.contract.memory_report import PARTS, size
from minidist.parallel.contract.residency import Residency
from minidist.scale.memory.estimates import Estimate, activations
from minidist.scale.memory.largest_batch import count, parse_bytes
from minidist.scale.memory.parameter_sizes import RankParameters, layers, on_rank
from minidist.scale.memory.saved_activations import Saved
from minidist.scale.memory.state_bytes import BYTES, States, StateSharing, held_for

COLUMNS = ("parameters", "gradients", "state")
TITLES = {"parameters": "parameters", "gradients": "gradients", "state": "optimizer state"}
SETS = ("the two ends", "the first half of the layers", "the second half of the layers")
Table = Sequence[Residency]
"""The residency of each of SETS."""


@dataclass(frozen=True)
class Room:
    """A model, ranks, and the memory that each has."""

    title: str
    model: str
    ranks: int
    memory: str  # of a rank
    micro_batches: int  # of one row each, in a step
    tokens: int = 1024
    precision: str = "bf16"

    @property
    def shape(self) -> TransformerConfig:
        """The model's shape."""
        return CONFIGS[self.model]

    @property
    def story(self) -> str:
        """The room in a sentence."""
        passes = "one micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return (
            f"{self.model} ({count(self.shape.parameters())} parameters) in {self.precision} with Adam, on "
            f"{self.ranks} ranks of {self.memory} each. A step has {passes} a rank, of one row of "
            f"{self.tokens} tokens. Every layer recomputes its activations."
        )


ROOMS = {
    "roomy": Room("A small model", "gpt2-small", 4, "2GB", 2),
    "one": Room("One micro-batch", "gpt2-large", 8, "4GB", 1),
    "several": Room("Four micro-batches", "gpt2-large", 8, "4.5GB", 4),
    "tight": Room("A tight fit", "gpt2-xl", 8, "7GB", 2),
    "tightest": Room("The ends too", "gpt2-xl", 8, "6.2GB", 1),
}


def choices() -> str:
    """The rooms with their stories, the sets and the columns of the table."""
    rooms = {name: {"title": room.title, "story": room.story} for name, room in ROOMS.items()}
    return json.dumps({"rooms": rooms, "sets": SETS, "columns": TITLES})


def answer(request: str) -> str:
    """Judge the table of a request: {"room": name, "table": for each set whether each of COLUMNS is whole}.

    The answer has "error"; or "verdict", "solved" (it fits), "least" (and sends no more than it has to),
    "rows": the parts of the memory and their bytes, and "sent": those of each set.
    """
    asked = json.loads(request)
    room = ROOMS[asked["room"]]
    try:
        return json.dumps(judge(room, read(asked["table"])))
    except ValueError as error:
        return json.dumps({"error": str(error)})


def read(table: Sequence[Mapping[str, bool | None]]) -> Table:
    """The residencies of a table; ValueError names an empty cell, or a row that no optimizer can step."""
    found = []
    for name, row in zip(SETS, table, strict=True):
        empty = [TITLES[column] for column in COLUMNS if row.get(column) is None]
        if empty:
            raise ValueError(f"Say who holds the {empty[0]} of {name}: every rank the whole, or each 1/n.")
        try:
            found.append(Residency(*(bool(row[column]) for column in COLUMNS)))
        except ValueError:
            shared = next(TITLES[column] for column in COLUMNS if not row[column])
            raise ValueError(
                f"{name.capitalize()}: a rank with the whole optimizer state updates everything, and needs "
                f"the whole {shared} for it. Keep the {shared} whole too, or the optimizer state in shares."
            ) from None
    return found


def judge(room: Room, table: Table) -> dict[str, object]:
    """What a table needs and sends, and how near it is to the best one."""
    budget, memory, sent = parse_bytes(room.memory), needed(room, table), sent_by(room, table)
    fits, best = memory.peak <= budget, least(room)
    if not fits:
        bytes_, largest = max((getattr(memory, part), part) for part in PARTS if part != "buffers")
        verdict = (
            f"It does not fit: a rank needs {size(memory.peak)} and has {size(budget)}. The largest part is "
            f"{'the optimizer state' if largest == 'optimizer' else f'the {largest}'}, {size(bytes_)}."
        )
    elif sum(sent) > best:
        verdict = (
            f"It fits, {size(memory.peak)} of {size(budget)}. But a rank sends {size(sum(sent))} in a step, "
            f"and {size(best)} would do. {saving(room, table)}"
        )
    else:
        verdict = (
            f"It fits, {size(memory.peak)} of {size(budget)}. No table that fits sends less: {size(best)}."
        )
    rows = [[part, size(getattr(memory, part))] for part in PARTS if part != "buffers"]
    rows += [["temporary", size(memory.transient)], ["at the fullest moment", size(memory.peak)]]
    return {
        "verdict": verdict,
        "solved": fits,
        "least": fits and sum(sent) <= best,
        "rows": rows,
        "sent": [*map(size, sent)],
    }


def saving(room: Room, table: Table) -> str:
    """What the set that sends most does, in a sentence."""
    sent, passes = sent_by(room, table), room.micro_batches
    name, row = max(zip(SETS, table, sent, strict=True), key=lambda each: each[2])[:2]
    return (
        f"{name.capitalize()} send most: each gradient is reduced {times(row.reductions(passes))}, and each "
        f"parameter gathered {times(row.gathers(passes))}."
    )


def times(number: int) -> str:
    """How often, in words."""
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


@cache
def parts(shape: TransformerConfig) -> tuple[tuple[int, ...], ...]:
    """For each of SETS its layers; the embeddings are layer 0, and the head is the last."""
    half, last = shape.layers // 2, shape.layers + 1
    return (0, last), tuple(range(1, half + 1)), tuple(range(half + 1, last))


def of_layers(shape: TransformerConfig, wanted: Sequence[int]) -> RankParameters:
    """The parameters of some layers, in their order."""
    whole, sizes = on_rank(shape), layers(shape)
    root = whole.units[0] if 0 in wanted else 0
    units = [root, *(whole.units[layer + 1] for layer in sorted(wanted))]
    return RankParameters([each for layer in sorted(wanted) for each in sizes[layer]], units, root)


def needed(room: Room, table: Table) -> Estimate:
    """The bytes of a rank. Sets with one residency share their buckets, as in a model with a single row."""
    shape, total = room.shape, States(0, 0, 0)
    for residency in dict.fromkeys(table):
        own = (part for part, each in zip(parts(shape), table, strict=True) if each == residency)
        sharing = StateSharing(residency, room.ranks, room.precision, "adam")
        found = held_for(of_layers(shape, [*chain(*own)]), sharing)
        total = States(*(getattr(total, each) + getattr(found, each) for each in States.__dataclass_fields__))
    saved = Saved(shape, 1, room.tokens, BYTES[room.precision])
    return Estimate.of(total, *activations(saved, 1, True)[0])


def sent_by(room: Room, table: Table) -> list[float]:
    """The bytes that a rank sends in a step for each set."""
    sizes = [BYTES[room.precision] * sum(of_layers(room.shape, own).sizes) for own in parts(room.shape)]
    return [
        each.bytes_sent(bytes_, room.ranks, room.micro_batches)
        for each, bytes_ in zip(table, sizes, strict=True)
    ]


@cache
def least(room: Room) -> float:
    """The fewest bytes that a table which fits sends: all tables are tried."""
    budget = parse_bytes(room.memory)
    rows = [Residency(*each, False) for each in product((True, False), repeat=2)] + [
        Residency(True, True, True)
    ]
    tables = product(rows, repeat=len(SETS))
    fitting = [sum(sent_by(room, each)) for each in tables if needed(room, each).peak <= budget]
    if not fitting:
        raise ValueError(f"{room.title}: no table fits")
    return min(fitting)
