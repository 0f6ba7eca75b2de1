"""Hunt a mistake of minidist's collection: ask detectors, blame a line, mend the page.

    case = Case("mean-of-means", report="...", par=5)
    case.show()                          # the report, and the page with its mistake
    case.ask("norm")                     # what a detector says, for its price
    case.blame(31)                       # is it this line?
    case.mend({31: "new text"})          # WrongAnswer where the mended page is still wrong

A mend is right if what it trains equals one process and costs what the right page costs: on other data, other
weights and more ranks than the detectors have seen. How it is written does not matter. A refusal tells its
cause: the mend silences a detector and leaves the mistake, say, or does the whole work on each rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from checks.pictures import evidence
from checks.support.answers import Limit, in_time
from checks.support.verdicts import Right, Score, WrongAnswer, wrong
from minidist.parallel.debugging.detectors import EXACT, SHORT, Run, Subject, ask
from minidist.plain.mistakes import Mistake, collection
from minidist.plain.mistakes.examine import DETECTORS, subject

PRICES = {
    "bytes": 5, "first loss": 5, "order": 5, "memory": 10, "norm": 10, "parameters": 10, "work": 10,
    "gradients": 15, "resume": 15, "placements": 20, "loss": 30,
}  # fmt: skip
"""In points. The loss takes 100 steps, and gradients and placements say most."""
BEGIN, HINT, WRONG = 100, 10, 20
LOOKS = ("order", "first loss", "gradients", "norm", "parameters", "resume")
"""What a mend has to pass, beside COUNTS: all but the loss, which shows least, and placements."""
COUNTS: dict[str, tuple[Callable[[Run], list[int]], float, str]] = {
    "bytes": (
        lambda run: [sum(call.sent for call in calls) for calls in run.calls],
        1.005,
        "send {:,} bytes",
    ),
    "work": (lambda run: run.work, 1.001, "do {:,} multiplications"),
    "memory": (lambda run: run.held, 1.02, "hold {:,} bytes, after a step and at most in it"),
}
"""Of each rank, and how much more than the right page a mend may take, as with two messages for one."""
LIMIT = 120.0
"""Seconds for the trainings on two ranks, or on four. Idle they take two to eight, on a busy laptop 20."""
Mend = dict[Any, str]


@dataclass
class Case:
    """A page with a mistake, and what hunting it has cost so far."""

    name: str  # of the mistake
    report: str
    par: int  # the price of the detectors that its best hunter asks
    title: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    misses: int = 0  # wrong lines, and mends that were refused
    hints: int = 0
    closed: int | None = None  # the points of the first mend that passed
    refused: str = ""  # whether the mend that was tried last has the right place

    @cached_property
    def mistake(self) -> Mistake:
        """The record."""
        return collection()[self.name]

    @cached_property
    def page(self) -> list[str]:
        """The page's lines, with the mistake."""
        return self.mistake.source().splitlines()

    @property
    def spent(self) -> int:
        """Points so far."""
        return sum(self.asked.values()) + WRONG * self.misses + HINT * min(self.hints, 3)

    @property
    def points(self) -> int:
        """What is left."""
        return max(0, BEGIN - self.spent)

    @cached_property
    def subject(self) -> Subject:
        """The trainings that detectors look at."""
        return subject(self.mistake)

    def show(self) -> None:
        """Show the report and the page."""
        evidence.page(self.title, self.report, self.mistake.rung, self.page)

    def ask(self, *names: str) -> None:
        """Print what detectors say, each for its price the first time; without names the prices."""
        for name in names:
            if name not in DETECTORS:
                wrong(f"There is no detector {name!r}; there are {', '.join(PRICES)}.")
            found = ask(self.subject, {name: DETECTORS[name]}, alone=("order", "placements"))[name]
            price = 0 if name in self.asked or self.closed is not None else PRICES[name]
            self.asked.setdefault(name, price)
            print(f"{name} ({price} points): {found.sentence or 'nothing.'}")
            self._picture(name)
        if not names:
            print("  ".join(f"{name} {price}" for name, price in PRICES.items()))
        print(f"{self.points} of {BEGIN} points are left.")

    def _picture(self, name: str) -> None:
        found, whole = self.subject.found, self.subject.whole
        if self.subject.found["short"].failed:
            return
        if name == "loss":
            evidence.losses(found["long"].losses, whole["long"].losses)
        elif name in ("gradients", "parameters"):
            evidence.strip(name, _differences(self.subject, name))
        elif name in COUNTS and self.subject.right is not None:
            mine, right = (COUNTS[name][0](each["short"]) for each in (found, self.subject.right))
            for rank, (count, should) in enumerate(zip(mine, right, strict=True)):
                print(f"  rank {rank}: {count:12,} and should be {should:12,}")

    def blame(self, line: int | str) -> bool:
        """Say whether the mistake is in a line, which is its number or its text; a wrong one costs points."""
        number = self.number(line)
        hit = number in self.culprits
        self.misses += not hit and self.closed is None
        print(f"Line {number}: {self.page[number - 1].strip()}")
        print("It goes wrong here." if hit else f"It does not go wrong here. {self.points} points are left.")
        return hit

    @cached_property
    def culprits(self) -> set[int]:
        """The numbers of the changed lines, and of those on both sides of a gap."""
        right = replace(self.mistake, diff="").source().splitlines()
        found: set[int] = set()
        for tag, _, _, first, last in difflib.SequenceMatcher(None, right, self.page, False).get_opcodes():
            if tag == "delete":
                found |= {first, first + 1}
            elif tag != "equal":
                found |= {*range(first + 1, last + 1)}
        return {number for number in found if self.page[number - 1].strip()}

    def number(self, line: int | str) -> int:
        """Return the number of a line that is given by its number or its text."""
        if isinstance(line, int) and 1 <= line <= len(self.page):
            return line
        text = [number for number, each in enumerate(self.page, 1) if each.strip() == str(line).strip()]
        if len(text) != 1:
            wrong(
                f"{line!r} is no line of the page: give a number from 1 to {len(self.page)}, or the text of "
                f"a line that is there once{f' (it is there {len(text)} times)' if text else ''}."
            )
        return text[0]

    def mended(self, mend: Mend) -> str:
        """The page's text with a mend's lines in place of its own.

        Raises:
            WrongAnswer: it is no mend, or the page is no Python any more.
        """
        if not isinstance(mend, dict) or not all(isinstance(text, str) for text in mend.values()) or not mend:
            wrong(f"A mend is a dictionary like {{31: 'new text'}}, from lines to their text. Got {mend!r}.")
        page = [*self.page]
        for line, text in mend.items():
            number = self.number(line)
            old = self.page[number - 1]
            own = "" if text[:1].isspace() else old[: len(old) - len(old.lstrip())]
            page[number - 1] = "\n".join(own + each if each else each for each in text.split("\n"))
        whole = "".join(line + "\n" for line in page)
        try:
            compile(whole, "page", "exec")
        except SyntaxError as error:
            lines = whole.splitlines()
            line = lines[(error.lineno or 1) - 1].strip() if (error.lineno or 1) <= len(lines) else "the end"
            wrong(f"With your lines the page is no Python any more: {error.msg}, at\n  {line}")
        return whole

    def verdict(self, mend: Mend, draw: np.random.Generator) -> Right:
        """Try a mend on fresh data and weights, on two ranks and on four.

        Raises:
            WrongAnswer: why it is refused.
        """
        page = self.mended(mend)
        numbers = {self.number(line) for line in mend}
        self.refused = (
            "You have the right place" if numbers & self.culprits else "The mistake is in another line"
        )
        try:
            tried = _tried(self.mistake, page, draw)
        except NotRunError:
            self.refused = ""
            raise
        score = Score("Points spent", self.spent, self.par, "ask less", slack=float("inf"))
        points = self.points if self.closed is None else self.closed
        return Right(tried, (score,), f"{points} of {BEGIN} points are yours.", points)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What a refused mend costs, and what is left for the first that passes."""
        self.refused, message = "", ""
        try:
            yield
        except WrongAnswer as error:
            if not self.refused:  # it was no mend at all, or does not run
                raise
            self.misses += self.closed is None
            message = f"{error}\n{self.refused}. {self.points} of {BEGIN} points are left."
        if message:
            raise WrongAnswer(message)
        self.closed = self.points if self.closed is None else self.closed

    def mend(self, lines: Mend, seed: int | None = None) -> None:
        """Check a mend of a case that is no exercise."""
        with self.counted():
            print(self.verdict(lines, np.random.default_rng(seed)))

    def debrief(self) -> None:
        """Say what it was: its lines, a symptom, and what finds it. An open case ends without points."""
        self.closed = self.closed or 0
        found = ask(self.subject, DETECTORS, alone=("order", "placements"))
        print(self.mistake)
        for name, one in found.items():
            print(f"{name:<12}{one.sentence or '-'}")


class NotRunError(WrongAnswer):
    """The mended page raises an error."""


def _differences(it: Subject, name: str) -> dict[str, list[float]]:
    """By parameter, how far each rank's is from that of one process, as a part of its size."""
    after, found = ("step" if name == "gradients" else "short"), {}
    for key, value in it.whole[after].parameters[0].items():
        size = float(
            (it.whole["start"].parameters[0][key] - value if name == "gradients" else value).abs().max()
        )
        by = [
            float((each[key] - value).abs().max()) if each[key].shape == value.shape else size
            for each in it.found[after].parameters
        ]
        found[key] = [each / (size or 1) if each > EXACT else 0.0 for each in by]
    return found


def _tried(mistake: Mistake, page: str, draw: np.random.Generator) -> int:
    """WrongAnswer where the mended page is wrong; on how many trainings it was tried."""
    lines = (("-", replace(mistake, diff="").source()), ("+", page))
    diff = "@@\n" + "".join(sign + line for sign, text in lines for line in text.splitlines(keepends=True))
    tried = 0
    for ranks in (2, 4):
        rows = mistake.rows if mistake.rows % 4 == 0 else int(draw.choice([6, 7, 9, 10, 11, 13]))
        broken, seed = replace(mistake, rows=rows), int(draw.integers(10**6))
        it = subject(replace(broken, diff=diff), ranks, seed)
        try:
            with in_time(LIMIT):
                found = _found(it)
        except Limit:
            wrong(
                f"On {ranks} ranks the mended page had not ended after {LIMIT:.0f} s, and still runs.",
                "  Restart the kernel.",
            )
        if found and not _found(it._replace(found=it.right)):  # or the page takes no four ranks
            says = f"On {ranks} ranks with {rows} rows: {next(iter(found.values()))}."
            if any(run.failed and "Stuck: " not in run.failed for run in it.found.runs.values()):
                raise NotRunError(f"{says}\n  A mend that does not run costs nothing.")
            wrong(says, *_cause(it, subject(broken, ranks, seed), found))
        tried += not found
    return tried


def _found(it: Subject) -> dict[str, str]:
    """What detectors find. Of bytes, work and memory the right page's are the most that a mend may take."""
    run: Run = it.found["short"]
    if run.failed or run.unread:
        return {"order": DETECTORS["order"](it)}
    found = {name: ask(it, {name: DETECTORS[name]})[name].sentence for name in LOOKS}
    for name, (count, more, does) in COUNTS.items():
        mine, right = count(run), count(it.right["short"])
        for measure, who in ((sum, "all ranks together"), (max, "the busiest of them")):
            if not found.get(name) and measure(mine) > more * measure(right):
                found[name] = f"{who} {does.format(measure(mine))}, where {measure(right):,} are enough"
    if "resumed" in it.found.runs and len(it.found["resumed"].losses) > SHORT:
        found["resume"] = f"a restart trains {len(it.found['resumed'].losses) - SHORT} steps again"
    return {name: sentence for name, sentence in found.items() if sentence}


def _cause(it: Subject, broken: Subject, found: dict[str, str]) -> list[str]:
    """Say in a line what a refused mend does, where that can be told."""
    run, before = it.found["short"], _found(broken)
    if run.failed:
        return []
    if "work" in found and max(run.work) > 0.9 * it.whole["short"].work[0]:
        return ["  A rank does the whole work of one process: it is a copy, and no parallel training."]
    if len(found.keys() & {*COUNTS}) < len(found) and _agree(run) and not _agree(broken.found["short"]):
        return ["  The mend hides the mistake: all ranks agree now, but not with one process."]
    if silent := " and the ".join(name for name in before if name not in found):
        shows = next(iter(found))
        if shows in before:
            return [
                f"  The mend hides the mistake: nothing is wrong with the {silent} now, but with the {shows}."
            ]
        return [f"  Nothing is wrong with the {silent} now. This is another mistake, in the {shows}."]
    return []


def _agree(run: Run) -> bool:
    first, *others = run.parameters
    return all(torch.allclose(each[name], first[name], 0, EXACT) for each in others for name in first)
