"""The puzzles' judges accept what is right, at par, and name what is wrong."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidist import Layout
from minidist.comm import algorithms
from minidist.parallel.contract.residency import ROWS
from minidist.scale.memory import estimate
from tests.helpers.clocks import HANG
from tests.helpers.quiet_pages import quiet_page

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, Any]]:
    """The modules docs/puzzle_*.py, by the names by which the page imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import puzzle_collectives
        import puzzle_residency
        import puzzle_schedules

        found = (puzzle_collectives, puzzle_schedules, puzzle_residency)
        yield {judge.__name__.removeprefix("puzzle_"): judge for judge in found}
        for name in ("playground", *(judge.__name__ for judge in found)):
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


SOLVED = "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3\nF0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"  # ZB-H1


def test_every_mark_is_proved_and_says_how_long_ranks_wait(judges: dict[str, Any]) -> None:
    judge = judges["schedules"]
    for name, told in json.loads(judge.choices()).items():
        hole = judge.HOLES[name]
        marks = {title: each for title, *each in told["marks"]}
        assert marks.keys() >= {"GPipe", "1F1B", "ZB-H1", "V"}  # every record gives one
        for seconds, idle, held, text in marks.values():
            found = said(judge, hole=name, text=text)
            assert found["score"] == [seconds, idle, held]
            assert found["fits"] == (held <= hole.budget)
            assert idle == pytest.approx(1 - 3 * hole.micro_batches / seconds)  # 3 s of work a micro-batch
        p, m = hole.ranks, hole.micro_batches
        assert marks["1F1B"][0] == 3 * (m + p - 1)
        assert marks["ZB-H1"][0] == 3 * m + p - 1
        assert marks["V"][2] <= hole.budget
    # No schedule is shorter than V's with the memory of 1F1B: the last rank begins after p - 1 half passes.
    assert marks["V"][:2] == [26.0, pytest.approx(4 / 13)]
    assert judge.score(judge.marks_of(judge.HOLES["four"])["V"])[0] == 3 * 6 + 3 / 2


def test_a_schedule_is_told_which_marks_it_beats(judges: dict[str, Any]) -> None:
    found = said(judges["schedules"], hole="first", text=SOLVED.lower().replace(" ", ", "))
    assert found["fits"]
    assert found["verdict"] == (
        "Proved: it ends, in 13 s; ranks wait for 7.7% of it, and the fullest holds 2 micro-batches. "
        "Shorter than 1F1B (15 s). As short as ZB-H1 (13 s). Not yet as short as V (12.5 s)."
    )


WRONG_SCHEDULES = {
    "nothing": ("", "the schedule is empty"),
    "a word": (SOLVED.replace("F2", "G2", 1), "rank 0 has 'G2', which is no instruction; write F3"),
    "a forward pass is missing": (SOLVED.replace("F2", "", 1), "micro-batch 2, chunk 0: there is no forward"),
    "a backward pass is missing": (SOLVED.replace("I3 W3", "", 1), "there is no backward pass (B3)"),
    "half a backward pass": (SOLVED.replace("W3", "", 1), "the backward pass is ['backward_input']"),
    "twice": (SOLVED.replace("F3", "F3 F3", 1), "rank 0 has F3 2 times"),
    "backward before forward": (SOLVED.replace("F0 F1 I0", "F1 I0 F0", 1), "before F0, which it needs"),
    "weights before inputs": (SOLVED.replace("I3 W3", "W3 I3", 1), "rank 0 has W3 before I3, which it needs"),
    "it never ends": (
        "F0 B0 F1 B1 F2 B2 F3 B3\nF0 F1 B0 B1 F2 B2 F3 B3",
        "the schedule never ends: rank 0 waits at recv B0 for rank 1",
    ),
    "one rank": (
        SOLVED.partition("\n")[0],
        "the schedule is for 1 ranks and 4 micro-batches; this hole has 2",
    ),
    "three micro-batches": (
        "\n".join(f"{own} F4 B4" for own in SOLVED.split("\n")),
        "the schedule is for 2 ranks and 5 micro-batches; this hole has 2 ranks and 4 micro-batches",
    ),
    "the order of messages": (
        SOLVED.replace("F0 F1", "F1 F0", 1),
        "messages arrive in the order in which they are sent",
    ),
    "three chunks": (
        "\n".join(
            " ".join(
                f"{kind}{i}.{chunk}"
                for kind in "FB"
                for chunk in (range(3) if kind == "F" else (2, 1, 0))
                for i in range(4)
            )
            for _ in range(2)
        ),
        "the schedule has 3 chunks a rank; a rank's layers are cut at most in two",
    ),
}


@pytest.mark.parametrize("fault", WRONG_SCHEDULES)
def test_a_wrong_schedule_is_named(judges: dict[str, Any], fault: str) -> None:
    text, wanted = WRONG_SCHEDULES[fault]
    found = said(judges["schedules"], hole="first", text=text)
    assert wanted in found.get("error", found)
    assert "score" not in found


def test_a_schedule_over_the_budget_is_refused(judges: dict[str, Any]) -> None:
    passes = " ".join(f"F{i}" for i in range(4)) + " " + " ".join(f"B{i}" for i in range(4))
    found = said(judges["schedules"], hole="first", text=f"{passes}\n{passes}")
    assert not found["fits"]
    assert "over the budget of 2" in found["verdict"]


def table(*rows: str) -> list[dict[str, bool | None]]:
    """A table with a letter for each cell: w for whole, s for a share, and . for an empty one."""
    cells = {"w": True, "s": False, ".": None}
    return [dict(zip(("parameters", "gradients", "state"), map(cells.get, row), strict=True)) for row in rows]


SETS = ("the two ends", "the first half of the layers", "the second half of the layers")
BEST = {
    "roomy": ("wws", "wws", "wws"),
    "one": ("wws", "wss", "wss"),
    "several": ("wws", "wws", "wss"),
    "tight": ("wws", "wss", "sss"),
    "tightest": ("sss", "wss", "sss"),
}


@pytest.mark.parametrize("room", BEST)
def test_the_best_table_of_a_room_fits_and_sends_least(judges: dict[str, Any], room: str) -> None:
    found = said(judges["residency"], room=room, table=table(*BEST[room]))
    assert found["solved"]
    assert found["least"], found["verdict"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("room", BEST)
def test_a_table_with_one_row_needs_what_the_planner_says(
    judges: dict[str, Any], room: str, zero: int
) -> None:
    judge = judges["residency"]
    asked, row = judge.ROOMS[room], ROWS[zero]
    layout = Layout(dp=asked.ranks, zero=zero, precision=asked.precision, recompute=True)
    assert judge.needed(asked, [row] * 3) == estimate(asked.model, layout, batch=(asked.ranks, asked.tokens))
    whole = 2 * asked.shape.parameters()
    assert sum(judge.sent_by(asked, [row] * 3)) == pytest.approx(
        row.bytes_sent(whole, asked.ranks, asked.micro_batches)
    )


WRONG_TABLES = {
    "an empty cell": (("wws", "w.s", "wws"), "Say who holds the gradients of the first half of the layers"),
    "an empty row": (("...", "wss", "wss"), "Say who holds the parameters of the two ends"),
    "state without parameters": (
        ("sww", "wss", "wss"),
        "The two ends: a rank with the whole optimizer state",
    ),
    "state without gradients": (("wss", "wss", "wsw"), "needs the whole gradients for it"),
    "state alone": (("wss", "ssw", "wss"), "needs the whole parameters for it"),
    "everything whole": (
        ("www", "www", "www"),
        "It does not fit: a rank needs 37.4 GB and has 7.00 GB. The largest",
    ),
    "state in shares alone": (("wws", "wws", "wws"), "The largest part is the parameters, 3.12 GB"),
    "gradients too": (("wss", "wss", "wss"), "It does not fit: a rank needs 7.72 GB"),
    "one half whole": (("sss", "www", "sss"), "The largest part is the optimizer state"),
    "everything in shares": (
        ("sss", "sss", "sss"),
        "a rank sends 16.4 GB in a step, and 11.9 GB would do. The first half of the layers send most: each "
        "gradient is reduced twice, and each parameter gathered 4 times",
    ),
    "the ends in shares": (("sss", "wss", "sss"), "and 11.9 GB would do"),
    "gradients whole, parameters not": (
        ("wws", "sws", "sss"),
        "It does not fit: a rank needs 7.64 GB and has 7.00 GB. The largest part is the gradients",
    ),
}


@pytest.mark.parametrize("fault", WRONG_TABLES)
def test_a_wrong_table_is_named(judges: dict[str, Any], fault: str) -> None:
    rows, wanted = WRONG_TABLES[fault]
    found = said(judges["residency"], room="tight", table=table(*rows))
    assert wanted in found.get("error", found.get("verdict"))
    assert not found.get("least")


# In a browser, by keyboard alone, with the names that a screen reader reads.


@pytest.fixture
def page(chromium: Any, site: Path) -> Iterator[Any]:
    """The page when Python has started, which must neither complain nor ask for anything but files."""
    if not (ROOT / "build" / "node_modules" / "pyodide").exists():
        pytest.skip("the npm package pyodide is missing, which `make site` installs")
    with quiet_page(chromium, (site / "puzzles.html").as_uri()) as opened:
        opened.wait_for_function("!!window.puzzlesReady")
        yield opened


def says(form: Any, text: str) -> None:
    """Wait for the verdict."""
    form.get_by_role("status").filter(has_text=text).wait_for()


@pytest.mark.browser
def test_a_collective_is_written_and_judged_by_keyboard(page: Any) -> None:
    form = page.locator("#collectives-form")
    form.get_by_role("combobox", name="Puzzle").focus()
    page.keyboard.press("ArrowDown")  # to the second, the tree
    page.keyboard.press("Tab")
    code = form.get_by_role("textbox", name="Your function")
    assert code.evaluate("each => each === document.activeElement")
    assert code.input_value().startswith("def tree_broadcast(rank, ranks, elements):")

    def typed(text: str) -> None:
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(text)
        page.keyboard.press("Control+Enter")

    typed("def tree_broadcast(rank, ranks, elements):\n    while True: pass\n")
    page.wait_for_timeout(100)
    assert page.evaluate("1 + 1") == 2  # the page is alive meanwhile
    says(form, "It had not ended after 5 s and was stopped. Does a loop never end?")
    typed(
        whole("yield Step(receives=[Message((rank + 1) % ranks, 0, elements)] * (ranks > 1))").replace(
            "broadcast", "tree_broadcast"
        )
    )
    says(form, "no rank goes on: rank 0 waits in step 0 for a message from rank 1")
    assert form.locator(".messages path.arrow").count() == 2
    typed(solution("tree_broadcast"))
    says(form, "Right on 1 to 8 ranks, and at par: ceil(log2 n) rounds")
    assert "✓✓" in form.get_by_role("option").nth(1).text_content()
    assert form.locator(".messages path.arrow").count() == 3  # on four ranks
    assert form.get_by_role("row", name="Rounds, one after the other 3 3").count() == 1
    for name in ("Run it on all ranks", "Start over", "Link to this solution"):
        page.keyboard.press("Tab")
        assert form.get_by_role("button", name=name).evaluate("each => each === document.activeElement")
    page.keyboard.press("Enter")
    says(form, "in the address bar")
    other = page.context.new_page()  # what was solved stays in the browser, and the link has the code
    other.goto(page.url)
    other.wait_for_function("!!window.puzzlesReady", timeout=HANG * 1000)
    kept = other.locator("#collectives-form")
    assert kept.get_by_role("combobox", name="Puzzle").input_value() == "tree_broadcast"
    assert kept.get_by_role("textbox", name="Your function").input_value() == solution("tree_broadcast")
    assert "✓✓" in kept.get_by_role("option").nth(1).text_content()


@pytest.mark.browser
def test_golf_is_played_by_keyboard_by_mouse_and_by_link(page: Any) -> None:
    form = page.locator("#golf-form")
    says(form, "Proved: it ends, in 15 s; ranks wait for 20.0% of it, and the fullest holds 2 micro-batches.")
    last = form.get_by_role("button", name="F1 on rank 0, 2 of 8, 1 s to 2 s")
    last.focus()
    page.keyboard.press("Shift+ArrowRight")
    form.get_by_role("button", name="F1 on rank 0, 3 of 8").wait_for()
    assert form.locator(":focus").get_attribute("aria-label").startswith("F1 on rank 0, 3 of 8")
    page.keyboard.press("ArrowDown")
    assert form.locator(":focus").get_attribute("aria-label").startswith("F1 on rank 1, 3 of 8")
    form.get_by_role("button", name="Undo").press("Enter")
    form.get_by_role("button", name="F1 on rank 0, 2 of 8").wait_for()
    box = form.get_by_role("button", name="F1 on rank 1, 3 of 8").bounding_box()
    left = form.get_by_role("button", name="F0 on rank 1, 1 of 8").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(left["x"] + left["width"] + 4, box["y"] + 10, steps=4)
    page.mouse.up()
    form.get_by_role("button", name="F1 on rank 1, 2 of 8").wait_for()
    text = form.get_by_role("textbox", name="The schedule")
    assert text.input_value().split("\n")[1] == "F0 F1 B0 B1 F2 B2 F3 B3"
    text.fill("F0 B0 F1 B1 F2 B2 F3 B3\nF0 F1 B0 B1 F2 B2 F3 B3")
    says(form, "the schedule never ends: rank 0 waits at recv B0 for rank 1")
    assert form.get_by_role("button", name="B0 on rank 0, 2 of 8, not run").count() == 1
    assert form.locator(".arrow").count() == 2
    text.fill(SOLVED)
    says(form, "Shorter than 1F1B (15 s). As short as ZB-H1 (13 s).")
    form.get_by_role("button", name="Link to this schedule").press("Enter")
    says(form, "in the address bar")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_function("!!window.puzzlesReady", timeout=HANG * 1000)
    kept = other.locator("#golf-form")
    assert kept.get_by_role("textbox", name="The schedule").input_value() == SOLVED
    assert kept.get_by_role("row", name="your best 13 s 7.7 % 2").count() == 1
    assert kept.get_by_role("row", name="V 12.5 s 4.0 % 2").count() == 1


@pytest.mark.browser
def test_a_table_is_filled_by_keyboard(page: Any) -> None:
    form = page.locator("#residency-form")
    form.get_by_role("combobox", name="Model and ranks").select_option("tight")
    says(form, "Say who holds the parameters of the two ends")
    for set_name, row in zip(SETS, BEST["tight"], strict=True):
        for column, cell in zip(("parameters", "gradients", "optimizer state"), row, strict=True):
            form.get_by_role("combobox", name=f"{column} of {set_name}").focus()
            page.keyboard.press("w" if cell == "w" else "1")
    says(form, "No table that fits sends less: 11.9 GB")
    assert (
        "✓✓" in form.get_by_role("combobox", name="Model and ranks").locator("option").nth(3).text_content()
    )
    form.get_by_role("combobox", name="parameters of the first half of the layers").focus()
    page.keyboard.press("1")
    says(form, "would do. The first half of the layers send most")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.locator("#golf-form").get_by_role("combobox", name="Hole").select_option("four")
    says(page.locator("#golf-form"), "Proved: it ends, in 27 s")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    names = "els => els.map(each => each.labels.length > 0 || !!each.ariaLabel)"
    assert all(page.locator("form.playground :is(input, select, textarea)").evaluate_all(names))
