"""The collection of mistakes: lines fit, detectors find what the page says, and nothing in what is right."""

from __future__ import annotations

import re
import runpy
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minidist import plain
from minidist.plain.mistakes import CLASSES, Mistake, apply, collection, lone_rank, read, recipe
from minidist.plain.mistakes.examine import DETECTORS, Found, examine, subject
from minidist.plain.mistakes.formulas import held_by
from minidist.plain.mistakes.ranks import Rank, on_ranks
from minidist.plain.mistakes.trainings import ADAMW, SHORT, batches_of, model_of, run
from tests.conftest import Clusters
from tests.helpers.plain_rungs import train

PAGE = Path(__file__).parents[2] / "docs/mistakes.md"
KNOWN = collection()
MODELS = {"tied": "tied", "positions": "positions"}
RIGHT = [Mistake(rung) for rung in (*plain.LADDER, "recipe")] + [Mistake("tensor_parallel", model="dropout")]
RIGHT += [Mistake("sharded", options=(("row", row),)) for row in ("data parallel", "ZeRO 1", "ZeRO 2")]
RIGHT += [Mistake(each.rung, each.name, MODELS.get(each.name, "")) for each in read("variants")]
CHEAP = [name for name in DETECTORS if name != "loss"]  # which takes 100 steps


def named(rung: Mistake) -> str:
    return " ".join([rung.rung, rung.on, *(str(value) for _, value in rung.options)])


def table() -> dict[str, set[str]]:
    """The page's table: the detectors that find each mistake."""
    lines = PAGE.read_text().partition("## Which detector finds which mistake")[2].partition("\n\nSeconds")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.strip().splitlines()]
    return {
        name: {d for d, mark in zip(rows[0][1:], marks, strict=True) if mark} for name, *marks in rows[2:]
    }


def test_there_are_many_of_every_class_and_the_page_has_them_all() -> None:
    assert [*KNOWN] == [*table()]
    assert len(KNOWN) >= 40
    assert {each.kind for each in KNOWN.values()} == {*CLASSES}
    assert len({each.source() for each in KNOWN.values()}) == len(KNOWN)
    for each in KNOWN.values():
        compile(each.source(), each.name, "exec")
        assert each.symptom
        assert each.diff.count("\n+") + each.diff.count("\n-") <= 12  # a few lines
        assert all(re.match(r"[\w.-]+/[\w.-]+#\d+\b", case) for case in each.case.split(", ") if each.case)


@pytest.mark.parametrize("text", ["", "a\nb\na\n"])
def test_lines_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="times in the text"):
        apply("@@\n-a\n+c\n", text)


def test_the_page_keeps_its_promises() -> None:
    found = table()
    assert all(found.values())
    assert sum("loss" not in detectors for detectors in found.values()) >= 10
    assert sum("placements" in detectors for detectors in found.values()) >= 12
    for detector in DETECTORS:
        assert any(detector in detectors for detectors in found.values())
    assert found["hidden-blocks-computed"] == {"work"}
    assert found["parameters-not-freed"] == found["all-micro-batches-held"] == {"memory"}
    assert found["low-weights-saved"] == {"resume"}
    assert f"[{len(found)} of them" in (PAGE.parent / "index.md").read_text()


@pytest.mark.parametrize("rung", RIGHT, ids=named)
def test_placements_find_nothing_in_what_is_right(rung: Mistake) -> None:
    assert examine(rung, ["placements"])["placements"].sentence == ""


def check(rung: Mistake, detectors: list[str]) -> None:
    found = examine(rung, detectors)
    expected = table().get(rung.name, set())
    assert {name for name, one in found.items() if one.sentence} == expected & {*detectors}, found


SAMPLE = ["one-rank-logs", "gathered-twice", "tied-weights-not-summed"]
SAMPLE += ["hidden-blocks-computed", "low-weights-saved"]
FIRST = [Mistake(rung) for rung in ("data_parallel", "tensor_parallel", "recipe")]


@pytest.mark.parametrize(
    "rung", [pytest.param(each, marks=[] if each in FIRST else pytest.mark.deep) for each in RIGHT], ids=named
)
def test_nothing_is_found_in_what_is_right(rung: Mistake) -> None:
    check(rung, CHEAP)


# Each takes some seconds: five always, a third with the deep tests, the others with the planted mistakes.
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.faults if i % 3 else pytest.mark.deep)
    for i, name in enumerate(KNOWN)
]


@pytest.mark.parametrize("name", NAMES)
def test_detectors_find_what_the_page_says(name: str) -> None:
    check(KNOWN[name], CHEAP)


@pytest.mark.parametrize(
    "rung",
    [
        pytest.param(
            each, marks=pytest.mark.deep if each in FIRST or each.name in SAMPLE else pytest.mark.faults
        )
        for each in (*RIGHT, *KNOWN.values())
    ],
    ids=lambda each: each.name or named(each),
)
def test_the_loss_shows_what_the_page_says(rung: Mistake) -> None:
    check(rung, ["loss"])


@pytest.mark.parametrize(
    ("detector", "name"),
    [
        ("bytes", "last-layer-not-reduced"),
        ("bytes", "gathered-twice"),
        ("bytes", "partial-gradient-before-the-pair"),
        ("bytes", "norms-not-reduced"),
        ("bytes", "own-heads-not-reduced"),
        ("bytes", "reduced-after-every-micro-batch"),
        ("memory", "gradients-kept"),
        ("memory", "parameters-not-freed"),
        ("memory", "last-rank-has-the-rest"),
    ],
)
def test_the_bytes_of_a_formula_need_no_right_training(detector: str, name: str) -> None:
    for diff, says in ((KNOWN[name].diff, "the formula says"), ("", "")):
        it = subject(replace(KNOWN[name], diff=diff))._replace(right=None)
        assert says in (found := DETECTORS[detector](it))
        assert bool(found) == bool(says)


def test_the_page_is_what_its_script_writes() -> None:
    marks = {
        name: {detector: Found("x" if detector in found else "", 0.0) for detector in DETECTORS}
        for name, found in table().items()
    }
    page = runpy.run_path(str(PAGE.with_suffix(".py")))["page"]
    written = re.sub(r"\nSeconds of .*\n", "", PAGE.read_text())
    assert page(marks) == written, "run: python docs/mistakes.py"


# Ranks as threads are ranks.


@pytest.mark.parametrize("rung", ["overlap", "sharded", "pipeline", "sequence_parallel", "ring_attention"])
def test_threads_send_and_compute_what_processes_do(cluster_of: Clusters, rung: str) -> None:
    found = run(Mistake(rung), 2, SHORT)
    ranks = cluster_of(2).run(train, rung, {}, batches_of(SHORT, Mistake.rows), ADAMW)
    for rank, right in enumerate(ranks):
        torch.testing.assert_close(found.losses, right.losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.parameters[rank], right.parameters, rtol=1e-10, atol=1e-10)
        calls = [(call.name, call.sent) for call in found.calls[rank]]
        assert sorted(calls) == sorted(right.calls)


@pytest.mark.parametrize("rung", ["buckets", "sharded", "pipeline", "sequence_parallel", "ulysses"])
def test_four_ranks_hold_the_bytes_of_a_formula(rung: str) -> None:
    found = run(Mistake(rung), 4, 1, counted=True).kept
    assert found == [held_by(rung, rank, 4, model_of("", 0)) for rank in range(4)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_recipe_sends_the_bytes_of_its_formula(ranks: int) -> None:
    assert "2 (n - 1) / n (S + 8) bytes" in (recipe.__doc__ or "")
    size = sum(p.numel() * 8 for p in model_of("", 0).parameters())
    for calls in run(Mistake("recipe"), ranks, SHORT).calls:
        each = [call.sent for call in calls if call.name == "all_reduce"]
        assert sum(each[:-1]) == SHORT * 2 * (ranks - 1) * (size + 8) // ranks  # the last are the losses


def of_rank(calls: dict[int, Callable[[Rank], Any]]) -> str:
    return on_ranks(2, lambda comm: calls[comm.number](comm))[2]


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (lambda c: c.all_reduce(torch.ones(2)), lambda c: c.all_reduce(torch.ones(3)), r"where rank . calls"),
        (lambda c: c.all_reduce(torch.ones(2)), lambda c: c.broadcast(torch.ones(2)), r"where rank . calls"),
        (lambda c: c.recv(torch.ones(2), 1), lambda c: c.recv(torch.ones(2), 0), "wait for each other"),
        (lambda c: c.recv(torch.ones(2), 1), lambda c: None, r"wait for each other: rank 0 in recv of \[2\]"),
        (lambda c: c.recv(torch.ones(2), 1), lambda c: c.send(torch.ones(3), 0), "expects recv"),
    ],
)
def test_ranks_that_would_hang_stop_at_once(first: Any, second: Any, sentence: str) -> None:
    assert re.search(sentence, of_rank({0: first, 1: second}))


# Placements, one use each.


def placed(lines: str) -> str:
    """What is wrong with a training that does this."""
    text = f"import torch\ndef train(model, batches, make):\n{lines}"

    def bound(comm: Any) -> Any:
        space: dict[str, Any] = {"comm": comm}
        exec(compile(text, "<lines>", "exec"), space)
        return space["train"]

    return lone_rank.check(bound, partial(model_of, "", 0))


START = """
    for p in model.parameters():
        comm.broadcast(p.detach())
    make(model.parameters())
    w = model[0].weight
    rows = batches[0][0].tensor_split(2)[comm.rank()].flatten()
    x = torch.nn.functional.embedding(rows, w)  # a shard
    partial = x.T @ x
"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("comm.all_reduce(w.detach())", "which is replicated: the sum is n times too large"),
        ("comm.all_reduce(x.detach())", "which is shard: different parts are added up"),
        ("comm.all_gather(partial)", "which is partial: nobody adds it up"),
        ("partial.relu()", "relu takes a partial sum"),
        ("partial + torch.ones(24)", "a partial sum and a tensor that is replicated are added up"),
        ("partial * partial", "mul takes a partial sum"),
        ("torch.linalg.vector_norm(x)", "the norm of a shard"),
        ("comm.all_reduce(partial.detach()).relu()", ""),
        ("(partial + partial.T) / 3", ""),
        ("comm.reduce_scatter(partial.detach()).relu()", ""),
        ("torch.rand(3) if comm.rank() else comm.broadcast(torch.ones(2))", "rank 0 calls broadcast"),
    ],
)
def test_a_use_takes_some_placements(line: str, sentence: str) -> None:
    found = placed(f"{START}    {line}\n")
    assert sentence in found if sentence else not found, found


def test_a_variant_changes_what_its_mistakes_change_further() -> None:
    each = KNOWN["part-clips-alone"]
    assert replace(each, diff="").source() != Mistake(each.rung).source()


def test_ctrl_c_waits_for_a_rank_that_computes() -> None:
    ended = threading.Event()

    def body(_: Rank) -> None:
        time.sleep(0.1)  # so that the caller waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        on_ranks(1, body)
    assert ended.is_set()
