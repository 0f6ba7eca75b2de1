"""The puzzles' judges accept what is right, at par, and name what is wrong."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidist.comm import algorithms

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, Any]]:
    """The modules docs/puzzle_*.py, by the names by which the page imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import puzzle_collectives

        yield {"collectives": puzzle_collectives}
        for name in ("puzzle_collectives",):
            patch.delitem(sys.modules, name)


def said(judge: Any, **request: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(judge.answer(json.dumps(request)))
    return found


def solution(name: str) -> str:
    """The library's own algorithm, as a reader writes it."""
    others = {"broadcast": "tree_broadcast"}
    others |= {each: f"{each}_all_reduce" for each in ("halving_doubling", "hierarchical")}
    function = others.get(name, name)
    code = inspect.getsource(sys.modules[getattr(algorithms, function).__module__])
    return f"{code}\n\n{name} = {function}\n"


PUZZLES = (
    "broadcast tree_broadcast tree_all_reduce ring_all_gather ring_reduce_scatter ring_all_reduce "
    "halving_doubling hierarchical"
)


@pytest.mark.parametrize("name", PUZZLES.split())
def test_the_librarys_own_algorithm_is_at_par(judges: dict[str, Any], name: str) -> None:
    found = said(judges["collectives"], puzzle=name, code=solution(name))
    assert found.get("error") is None
    assert "and at par" in found["verdict"]
    assert all(own == par > 0 for _, own, par, _ in found["scores"])


RING = """
def {name}(rank, ranks, elements):
    bounds = offsets(elements, ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range({rounds}):
        out, into = (rank - step - {add}) % ranks, (rank - step - 1 - {add}) % ranks
        yield Step(
            sends=Message({after}, bounds[out], bounds[out + 1]),
            receives=Message(before, bounds[into], {stop}, reduce={add} > 0),
        )
"""


def ring(name: str, rounds: str = "ranks - 1", add: int = 0, after: str = "after", stop: str = "") -> str:
    stop = stop or "bounds[into + 1]"
    return RING.format(name=name, rounds=rounds, add=add, after=after, stop=stop)


def whole(body: str) -> str:
    """A broadcast or an all-reduce with this body."""
    return f"def broadcast(rank, ranks, elements):\n    {body}\n"


WRONG = {
    "each listens before it speaks": (
        "ring_all_gather",
        """
def ring_all_gather(rank, ranks, elements):
    bounds = offsets(elements, ranks)
    before = (rank - 1) % ranks
    if ranks > 1:
        yield Step(receives=Message(before, bounds[before], bounds[before + 1]))
        yield Step(sends=Message((rank + 1) % ranks, bounds[rank], bounds[rank + 1]))
""",
        "On 2 ranks, 4 elements: no rank goes on: rank 0 waits in step 0 for a message from rank 1; rank 1",
    ),
    "nobody takes a message": (
        "broadcast",
        whole("yield Step(sends=[Message(peer, 0, elements) for peer in range(1, ranks) if rank == 0])"),
        "On 2 ranks, 4 elements: no rank goes on: rank 0 waits in step 0 for rank 1 to take a message",
    ),
    "nothing is sent": (
        "broadcast",
        whole("yield Step()"),
        "element 0 of rank 1 ends with rank 1's once; it should be rank 0's once",
    ),
    "a part stays away": (
        "ring_all_gather",
        ring("ring_all_gather", rounds="ranks - 2"),
        "ends with what was there before; it should be rank 1's once",
    ),
    "the parts go too far": (
        "ring_reduce_scatter",
        ring("ring_reduce_scatter", rounds="ranks", add=1),
        "On 1 rank, 3 elements: reduce_scatter: element 0 of rank 0 ends with rank 0's 2 times; it should be",
    ),
    "the sum ends on the wrong rank": (
        "ring_reduce_scatter",
        ring("ring_reduce_scatter", add=2),
        "On 2 ranks, 4 elements: reduce_scatter: element 0 of rank 0 ends with rank 0's once",
    ),
    "what arrives is stored, not added": (
        "ring_reduce_scatter",
        ring("ring_reduce_scatter", add=1).replace("reduce=1 > 0", "reduce=False"),
        "element 0 of rank 0 ends with rank 1's once; it should be rank 0's once, rank 1's once",
    ),
    "the halves do not meet": (
        "ring_all_reduce",
        ring("ring_all_reduce", rounds="2 * (ranks - 1)", add=1),
        "it should be rank 0's once, rank 1's once",
    ),
    "parts are taken for equal": (
        "ring_all_gather",
        ring("ring_all_gather", stop="bounds[into] + elements // ranks"),
        "On 3 ranks, 7 elements: rank 0 in step 0 sends 3 elements to rank 1, which in step 0 expects 2",
    ),
    "another part than was sent": (
        "tree_broadcast",
        "def tree_broadcast(rank, ranks, elements):\n"
        "    if rank == 0: yield Step(sends=[Message(i, 0, 1) for i in range(1, ranks)])\n"
        "    else: yield Step(receives=Message(0, 1, 2))\n",
        "sends elements from 0 on to rank 1, which in step 0 puts them from 1 on",
    ),
    "no rank after the last": (
        "ring_all_gather",
        ring("ring_all_gather", after="rank + 1"),
        "rank 1 in step 0 names rank 2; the ranks are 0 to 1",
    ),
    "beyond the end": (
        "broadcast",
        whole("yield Step(sends=[Message(i, 0, elements + 1) for i in range(1, ranks) if rank == 0])"),
        "rank 0 in step 0 sends [0, 5); the buffer has 4 elements",
    ),
    "half an element": (
        "broadcast",
        whole("yield Step(sends=Message(0, 0, elements / 2))"),
        "On 1 rank, 3 elements: rank 0 yields Message(peer=0, start=0, stop=1.5, reduce=False), whose",
    ),
    "a star": (
        "ring_all_gather",
        """
def ring_all_gather(rank, ranks, elements):
    bounds = offsets(elements, ranks)
    others = [i for i in range(ranks) if i != rank]
    yield Step(
        [Message(i, bounds[rank], bounds[rank + 1]) for i in others],
        [Message(i, bounds[i], bounds[i + 1]) for i in others],
    )
""",
        "the result is right, but rank 0 sends to ranks 1 and 2, and this is no ring",
    ),
    "it never ends": (
        "broadcast",
        whole("while True: yield Step()"),
        "On 1 rank, 3 elements: rank 0 has not ended after 1000 steps",
    ),
    "a mistyped name": (
        "broadcast",
        whole("yield Stop()"),
        "On 1 rank, 3 elements: rank 0 raises NameError in line 2: name 'Stop' is not defined",
    ),
    "no yield": ("broadcast", whole("return None"), "rank 0's function returns None; it has to yield"),
    "a yield of something else": ("broadcast", whole("yield 3"), "rank 0 yields 3, which is no Step"),
    "another name": ("tree_broadcast", whole("yield Step()"), "There is no function tree_broadcast"),
    "no Python": (
        "broadcast",
        "def broadcast(rank:",
        "Python does not read it: '(' was never closed in line 1",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_collective_is_named(judges: dict[str, Any], fault: str) -> None:
    name, code, wanted = WRONG[fault]
    found = said(judges["collectives"], puzzle=name, code=code)
    assert wanted in found.get("error", found)
    assert "verdict" not in found
    if "no rank goes on" in wanted:
        assert found["picture"]["waiting"]


def test_a_collective_above_par_is_told_what_to_save(judges: dict[str, Any]) -> None:
    naive = inspect.getsource(algorithms.naive_all_reduce).replace("naive_all_reduce", "tree_all_reduce")
    found = said(judges["collectives"], puzzle="tree_all_reduce", code=naive)
    busiest = "above par. Messages of the busiest rank: 7, and par is 3 (8 ranks, 21 elements)"
    assert busiest in found["verdict"]
    assert found["scores"][0] == ["Messages of the busiest rank", 7, 3, "8 ranks, 21 elements"]


def test_par_is_the_formula(judges: dict[str, Any]) -> None:
    """Where the elements divide; a puzzle's cases have ragged tensors too."""
    for puzzle in judges["collectives"].PUZZLES.values():
        one = algorithms.schedule(puzzle.operation, puzzle.algorithm, 8, 64)
        wanted = [algorithms.formula(puzzle.operation, puzzle.algorithm, rank, 8, 256) for rank in range(8)]
        assert judges["collectives"].counts(one, [], 8)["Bytes that the busiest rank sends"] == max(wanted)
