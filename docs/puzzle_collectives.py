"""The judge of the puzzle "write a collective": a reader's generator, run on simulated ranks.

The page runs this file in the browser, by Pyodide. A solution has the form of minidist/comm/algorithms: a
generator of the steps of one rank. `proof.run` executes all ranks in one process, so a deadlock and a wrong
part are named as `algorithms.check` names them. What the ranks send is compared with the library's algorithm.
"""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minidist.comm.algorithms import proof
from minidist.comm.algorithms.registry import CollectiveSchedule, schedule
from minidist.comm.algorithms.steps import Message, Step, bytes_sent, offsets

ITEMSIZE = 4  # bytes of a float32
MOST_STEPS = 1000
CASES = [(1, 3, {}), (2, 4, {}), (3, 6, {}), (3, 7, {}), (4, 8, {}), (5, 3, {}), (8, 16, {}), (8, 21, {})]
"""Ranks, elements, and further arguments; the smallest first, so that the first failure is the simplest."""
BUSIEST = ("Messages of the busiest rank", "Bytes that the busiest rank sends")
ROUNDS = "Rounds, one after the other"
BETWEEN = "Bytes between the nodes"
IN_ALL = ("Messages in all", "Bytes in all")
IDEAS = {
    BUSIEST[0]: "let other ranks, which have the tensor by now, send too",
    BUSIEST[1]: "send a part in each step, never the whole tensor",
    ROUNDS: "let all ranks send in each step, instead of one after another",
    BETWEEN: "add up inside each node first, so that one sum leaves it and not one for each rank",
    IN_ALL[0]: "each rank but the source needs the tensor once",
    IN_ALL[1]: "each rank but the source needs the tensor once",
}


@dataclass(frozen=True)
class Puzzle:
    """One collective to write."""

    title: str
    operation: str  # whose result is wanted
    algorithm: str  # of the library, whose counts are par
    task: str
    formula: str  # of par, in words
    counted: tuple[str, ...] = (*BUSIEST, ROUNDS)
    ring: bool = False  # whether each rank may send to one other alone
    cases: list[tuple[int, int, dict[str, int]]] | None = None
    body: str = ""  # what the reader begins with

    @property
    def signature(self) -> str:
        """The names of the function's arguments."""
        return "rank, ranks, elements" + (", node" if self.algorithm == "hierarchical" else "")


NODES = [
    (2, 4, {"node": 1}),
    (2, 4, {"node": 2}),
    (4, 8, {"node": 2}),
    (6, 12, {"node": 3}),
    (8, 16, {"node": 4}),
]
PUZZLES = {
    "broadcast": Puzzle(
        "Broadcast",
        "broadcast",
        "tree",
        "Rank 0 has a tensor. Every rank is to have it.",
        "n - 1 messages of S bytes",
        counted=IN_ALL,
        body="""\
    if rank == 0:
        yield Step(sends=[Message(other, 0, elements) for other in range(1, ranks)])
    # and the others?
""",
    ),
    "tree_broadcast": Puzzle(
        "Broadcast in few rounds",
        "broadcast",
        "tree",
        "The same, but whoever has the tensor sends it on: after each round twice as many ranks have it.",
        "ceil(log2 n) rounds, and no rank sends more messages than that",
        body="""\
    distance = 1
    while distance < ranks:
        # Ranks 0 to distance - 1 have the tensor. Who sends to whom?
        distance *= 2
    yield Step()
""",
    ),
    "tree_all_reduce": Puzzle(
        "All-reduce by a tree",
        "all_reduce",
        "tree",
        "Each rank has a tensor, and all are to end with the sum: first up a tree to rank 0, then down. A "
        "receive with reduce=True adds what arrives.",
        "2 ceil(log2 n) rounds",
        body="""\
    if rank == 1:
        yield Step(sends=Message(0, 0, elements))
    if rank == 0 and ranks > 1:
        yield Step(receives=Message(1, 0, elements, reduce=True))
""",
    ),
    "ring_all_gather": Puzzle(
        "All-gather around a ring",
        "all_gather",
        "ring",
        "Rank r has part r of the tensor, from bounds[r] to bounds[r + 1], and the rest is garbage. Every "
        "rank is to have all parts. Each rank sends to its neighbour alone.",
        "n - 1 messages, (n - 1) / n S bytes",
        ring=True,
        body="""\
    bounds = offsets(elements, ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        sent, received = rank, before  # right in step 0
        yield Step(
            sends=Message(after, bounds[sent], bounds[sent + 1]),
            receives=Message(before, bounds[received], bounds[received + 1]),
        )
""",
    ),
    "ring_reduce_scatter": Puzzle(
        "Reduce-scatter around a ring",
        "reduce_scatter",
        "ring",
        "Each rank has a whole tensor. Part r of the sum is to end on rank r; the other parts of its tensor "
        "may then hold anything. Each rank sends to its neighbour alone.",
        "n - 1 messages, (n - 1) / n S bytes",
        ring=True,
        body="""\
    bounds = offsets(elements, ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # Part r ends on rank r, having been everywhere. So where does it start?
    yield Step()
""",
    ),
    "ring_all_reduce": Puzzle(
        "All-reduce around a ring",
        "all_reduce",
        "ring",
        "All ranks are to end with the sum, and no rank is to send more than twice the tensor, however many "
        "ranks there are.",
        "2 (n - 1) messages, 2 (n - 1) / n S bytes",
        ring=True,
        body="""\
    bounds = offsets(elements, ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # You have written both halves.
    yield Step()
""",
    ),
    "halving_doubling": Puzzle(
        "Halving and doubling",
        "all_reduce",
        "halving_doubling",
        "The bytes of a ring in the rounds of a tree. Ranks exchange halves, then halves of the half that "
        "they keep, and so on; then the same backwards. The number of ranks is a power of two.",
        "2 log2 n messages, 2 (n - 1) / n S bytes",
        cases=[(1, 3, {}), (2, 4, {}), (2, 5, {}), (4, 8, {}), (4, 11, {}), (8, 16, {}), (16, 32, {})],
        body="""\
    bounds = offsets(elements, ranks)
    first, last = 0, ranks  # the parts that this rank still adds up
    distance = 1
    while distance < ranks:
        partner = rank ^ distance  # ranks that differ in one bit
        distance *= 2
    yield Step()
""",
    ),
    "hierarchical": Puzzle(
        "All-reduce on nodes",
        "all_reduce",
        "hierarchical",
        "Ranks 0 to node - 1 are on one node, the next node ranks on another, and so on. Links inside a node "
        "are fast, those between nodes slow. Add inside each node, then between nodes, then hand out inside.",
        "2 (L - 1) / L S + 2 (M - 1) / M S / L bytes, on M nodes of L ranks",
        counted=(*BUSIEST, BETWEEN, ROUNDS),
        cases=NODES,
        body="""\
    first = rank // node * node  # the first rank of this node
    mates = range(first, first + node)
    peers = range(rank % node, ranks, node)  # the ranks in my place on all nodes

    def ring(members, start, stop):
        \"\"\"Yield the steps of an all-reduce of [start, stop) among members.\"\"\"

    yield Step()
""",
    ),
}


class Wrong(Exception):
    """What is wrong with a solution, in a sentence."""


def choices() -> str:
    """The puzzles: title, task, formula, what they count, and the code to begin with."""
    told = {}
    for name, puzzle in PUZZLES.items():
        stub = f"def {name}({puzzle.signature}):\n{puzzle.body}"
        told[name] = {"title": puzzle.title, "task": puzzle.task, "formula": puzzle.formula, "stub": stub}
    return json.dumps(told)


def answer(request: str) -> str:
    """Judge the code of a request, {"puzzle": name, "code": text}.

    The answer has "printed", what the code printed; "picture", the messages of one case; and either "error",
    or "scores": for each count (what, the solution's, par, on which case), and "verdict".
    """
    asked = json.loads(request)
    puzzle, printed = PUZZLES[asked["puzzle"]], io.StringIO()
    said: dict[str, Any] = {}
    with redirect_stdout(printed):
        try:
            said["scores"], said["verdict"] = judge(asked["puzzle"], asked["code"], said)
        except Wrong as wrong:
            said["error"] = str(wrong)
    return json.dumps({**said, "printed": printed.getvalue()[:2000], "formula": puzzle.formula})


def judge(name: str, code: str, said: dict[str, Any]) -> tuple[list[list[Any]], str]:
    """The scores of a right solution, and a sentence; the picture goes into `said`.

    Raises:
        Wrong: on which ranks and elements it fails, and how.
    """
    puzzle, function = PUZZLES[name], function_of(name, code)
    scores: dict[str, list[Any]] = {}
    cases = puzzle.cases or CASES
    for ranks, elements, options in cases:
        where = f"On {ranks} rank{'s' * (ranks > 1)}, {elements} elements"
        where += f", {options['node']} on a node" if options else ""
        steps = tuple(steps_of(function, where, rank, ranks, elements, options) for rank in range(ranks))
        one = CollectiveSchedule(puzzle.operation, elements, steps, name)
        deliveries = proved(one, where, said)
        if puzzle.ring:
            in_a_ring(one, where)
        par = schedule(puzzle.operation, puzzle.algorithm, ranks, elements, **options)
        pars = counts(par, [*proof.run(par, *proof.start(par))], options.get("node", ranks))
        for what, count in counts(one, deliveries, options.get("node", ranks)).items():
            # The case in which it is farthest above par; of several the last, which has the most ranks.
            if what in puzzle.counted and ratio(count, pars[what]) >= ratio(*scores.get(what, [0, 1])[:2]):
                scores[what] = [count, pars[what], where.removeprefix("On ")]
        if ranks <= 4:
            said["picture"] = picture(one, deliveries)
    above = [what for what, (count, par, _) in scores.items() if count > par]
    verdict = f"Right on 1 to {cases[-1][0]} ranks"
    if above:
        count, par, where = scores[above[0]]
        verdict += (
            f", but above par. {above[0]}: {count}, and par is {par} ({where}). Idea: {IDEAS[above[0]]}."
        )
    else:
        verdict += f", and at par: {puzzle.formula}."
    return [[what, *found] for what, found in scores.items()], verdict


def ratio(count: int, par: int) -> float:
    """How far a count is above par."""
    return count / par if par else float(count > 0) + 1


def function_of(name: str, code: str) -> Callable[..., Any]:
    """The reader's function."""
    names: dict[str, Any] = {"Step": step, "Message": Message, "offsets": offsets, "__name__": "puzzle"}
    try:
        exec(compile(code, "<puzzle>", "exec"), names)
    except SyntaxError as error:
        raise Wrong(f"Python does not read it: {error.msg} in line {error.lineno}.") from None
    except Exception as error:
        raise Wrong(raised(error, "Before any rank runs")) from None
    if not callable(names.get(name)):
        raise Wrong(
            f"There is no function {name}; keep its first line: def {name}({PUZZLES[name].signature}):"
        )
    return names[name]


def step(sends: Any = (), receives: Any = ()) -> Step:
    """A `Step`, of which a side may also be a single message, or a list."""
    return Step(*((side,) if isinstance(side, Message) else tuple(side) for side in (sends, receives)))


def checked(each: Any, who: str) -> Step:
    """A step whose messages have whole numbers; anything else is `Wrong`."""
    if not isinstance(each, Step):
        raise Wrong(f"{who} {each!r}, which is no Step(...)")
    for message in (*each.sends, *each.receives):
        if not isinstance(message, Message):
            raise Wrong(f"{who} {message!r} in a Step, which is no Message(peer, start, stop)")
        if not all(type(number) is int for number in (message.peer, message.start, message.stop)):
            raise Wrong(f"{who} {message}, whose numbers are not whole; // divides without a remainder")
    return each


def steps_of(
    function: Callable[..., Iterable[Step]],
    where: str,
    rank: int,
    ranks: int,
    elements: int,
    options: dict[str, int],
) -> tuple[Step, ...]:
    """The steps of one rank."""
    try:
        made = function(rank, ranks, elements, **options)
        if made is None:
            raise Wrong(f"rank {rank}'s function returns None; it has to yield its steps: yield Step(...)")
        steps = tuple(checked(each, f"rank {rank} yields") for each in islice(made, MOST_STEPS + 1))
    except Wrong as wrong:
        raise Wrong(f"{where}: {wrong}.") from None
    except Exception as error:
        raise Wrong(raised(error, f"{where}: rank {rank}")) from None
    if len(steps) > MOST_STEPS:
        raise Wrong(f"{where}: rank {rank} has not ended after {MOST_STEPS} steps. Does its loop ever end?")
    return tuple(each for each in steps if each.sends or each.receives)


def raised(error: Exception, who: str) -> str:
    """A sentence about an exception of the reader's code, with the last of the reader's lines."""
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == "<puzzle>"]
    return f"{who} raises {type(error).__name__} in line {lines[-1] if lines else '?'}: {error}"


def proved(one: CollectiveSchedule, where: str, said: dict[str, Any]) -> list[proof.Delivery]:
    """All messages of a schedule that ends with the right result; of another, the picture up to its fault."""
    deliveries: list[proof.Delivery] = []
    try:
        for delivery in proof.run(one, *proof.start(one)):
            deliveries.append(delivery)
        proof.check(one)
    except proof.ScheduleError as error:
        said["picture"] = picture(one, deliveries, error.waiting)
        raise Wrong(f"{where}: {error}.") from None
    return deliveries


def in_a_ring(one: CollectiveSchedule, where: str) -> None:
    """Refuse a rank that sends to several others."""
    for rank, steps in enumerate(one.steps):
        peers = sorted({message.peer for each in steps for message in each.sends})
        if len(peers) > 1:
            said = f"{', '.join(map(str, peers[:-1]))} and {peers[-1]}"
            raise Wrong(
                f"{where}: the result is right, but rank {rank} sends to ranks {said}, and this is no ring. "
                "In a ring each rank sends to its neighbour alone, and passes on what arrived a step before."
            )


def counts(one: CollectiveSchedule, deliveries: list[proof.Delivery], node: int) -> dict[str, int]:
    """All that a puzzle may count."""
    messages = [sum(len(each.sends) for each in steps) for steps in one.steps]
    sent = [bytes_sent(steps, ITEMSIZE) for steps in one.steps]
    between = [each.sent.elements for each in deliveries if each.sender // node != each.receiver // node]
    rounds = max((each.begins + 1 for each in deliveries), default=0)
    found = (max(messages), max(sent), rounds, ITEMSIZE * sum(between), sum(messages), sum(sent))
    return dict(zip((*BUSIEST, ROUNDS, BETWEEN, *IN_ALL), found, strict=True))


def picture(
    one: CollectiveSchedule, deliveries: list[proof.Delivery], waiting: dict[int, list[int]] | None = None
) -> dict[str, Any]:
    """The messages of a case, for an arrow each, and who waits for whom where no rank goes on."""
    arrows = [
        [each.sender, each.receiver, each.begins, each.sent.start, each.sent.stop, each.received.reduce]
        for each in deliveries
    ]
    waits = {str(rank): peers for rank, peers in (waiting or {}).items()}
    return {"ranks": one.ranks, "elements": one.elements, "arrows": arrows, "waiting": waits}
