"""Compare a run with an earlier one: `minidist bench --compare OLD.json` says what got slower or faster.

Machines drift between runs. So if both runs have a ratio to the same peer, measured in turns, the ratios are
compared; otherwise the times, and only on the same machine. A benchmark is slower if its median rose by more
than the spread of both runs together (their interquartile ranges, widened for few rounds) and by more than
`FLOOR`, since runs of the same code differ by some percent even on a quiet machine. A count, such as a
lesson's cost, is slower if it rose at all. A single round has no spread, so it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from minidist.benchmarks.harness import columns, formats, results
from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results

FLOOR = 0.05
"""A difference has to exceed this share of the earlier figure."""
VERDICTS = ("slower", "faster", "same", "undecided", "new", "gone")
KINDS = {
    "ratio": "by the ratio to a program measured in turns, which holds even if the machine drifts",
    "time": "by time, which drifts with the machine",
    "cost": "by a count, which is exact",
}
"""How reliable a comparison is, by the first word of `Change.of`."""


@dataclass(frozen=True)
class Change:
    """The change of one benchmark between the two runs."""

    fullname: str
    label: str
    group: str
    verdict: str  # one of VERDICTS; "undecided" if one of the runs had a single round
    of: str = ""  # what is compared: "ratio to torch DDP", "time", "cost"
    old: float | None = None
    new: float | None = None

    def __str__(self) -> str:
        """One line: `overlap (Data parallelism): slower, ratio to torch DDP 0.95 -> 1.31`."""
        line = f"{self.label} ({self.group}): {self.verdict}"
        if self.old is None or self.new is None:
            return line
        told = {"time": formats.seconds, "cost": formats.count}.get(self.of, formats.times)
        return f"{line}, {self.of} {told(self.old)} -> {told(self.new)}"


@dataclass(frozen=True)
class Comparison:
    """All benchmarks of a run, compared with those of an earlier one."""

    changes: tuple[Change, ...]
    same_machine: bool
    earlier: str = ""  # the earlier file's machine, in words

    def having(self, verdict: str) -> list[Change]:
        """Return the changes with this verdict."""
        return [change for change in self.changes if change.verdict == verdict]

    @property
    def slower(self) -> bool:
        """Whether anything got slower."""
        return bool(self.having("slower"))

    def lines(self) -> list[str]:
        """Return one line for each change, the worst first, and a summary."""
        told = [str(change) for name in ("slower", "faster", "new", "gone") for change in self.having(name)]
        counts = ", ".join(f"{len(self.having(name))} {name}" for name in VERDICTS if self.having(name))
        kinds = [change.of.partition(" ")[0] for change in self.changes]
        how = [f"{kinds.count(kind)} {words}" for kind, words in KINDS.items() if kind in kinds]
        if not self.same_machine:
            how.append(f"times are not compared: the earlier file is from another machine, {self.earlier}")
        summary = counts or "nothing to compare"
        return [*told, f"{summary} ({'; '.join(how)})" if how else summary]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison for a program to read."""
        return {
            "same_machine": self.same_machine,
            "earlier_machine": self.earlier,
            "slower": len(self.having("slower")),
            "changes": [asdict(change) for change in self.changes],
        }


def compare(old: Results, new: Results, measured: Iterable[str], everything: bool) -> Comparison:
    """Compare a run with an earlier one.

    Args:
        old: the earlier file. Where it has a benchmark's quick and full result, the one in this run's mode
            counts.
        new: the results file that includes this run.
        measured: the full names of the benchmarks that this run measured.
        everything: whether the run covered all benchmarks; those that are missing then count as gone.
    """
    same = machine.same(old["machine_info"], new["machine_info"])
    new = results.rounded(new)  # as the old file is: otherwise a count of 5/7 would look changed
    after = {entry["fullname"]: entry for entry in results.newest(new)}
    mode = new["runs"][max(new["runs"])]["mode"]
    before = {entry["fullname"]: entry for entry in results.newest(old)}
    before |= {e["fullname"]: e for e in old["benchmarks"] if old["runs"][e["run"]]["mode"] == mode}
    changes = [
        judge(before.get(name), after[name], same) for name in dict.fromkeys(measured) if name in after
    ]
    if everything:
        gone = [entry for name, entry in before.items() if name not in after]
        changes += [_change(entry, "gone") for entry in gone]
    known = tuple(change for change in changes if change is not None)
    return Comparison(known, same, machine.title(old["machine_info"]))


def judge(old: Entry | None, new: Entry, same_machine: bool = True) -> Change | None:
    """Compare one benchmark's two results; return None if they cannot be compared."""
    if old is None:
        return _change(new, "new")
    before, after = old["extra_info"], new["extra_info"]
    if "cost" in before and "cost" in after:
        return _decide(new, "cost", *_costs(before, after), 0.0, True)
    rounds = min(old["stats"]["rounds"], new["stats"]["rounds"])
    for ratio, (peer, q1, q3) in columns.BESIDE.items():
        if ratio in before and ratio in after and before[peer] == after[peer]:
            widths = [extra[q3] - extra[q1] for extra in (before, after)]
            of, figures = f"ratio to {after[peer]}", (before[ratio], after[ratio])
            break
    else:
        if not same_machine:
            return None
        widths = [old["stats"]["iqr"], new["stats"]["iqr"]]
        of, figures = "time", (old["stats"]["median"], new["stats"]["median"])
    spread = max((1 + columns.FEW / rounds) * sum(widths), FLOOR * figures[0])
    return _decide(new, of, *figures, spread, rounds > 1)


def _costs(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, float]:
    """Return before and after of the count that rose most, or if none rose, of the one that fell most."""
    known = {each["what"]: each["cost"] for each in before.get("scores", [])}
    pairs = [(known[s["what"]], s["cost"]) for s in after.get("scores", []) if s["what"] in known]
    changed = [(old, new) for old, new in pairs if old != new]
    if not pairs:
        return before["cost"], after["cost"]
    rose = [pair for pair in changed if pair[1] > pair[0]]
    return max(rose or changed or pairs[:1], key=lambda pair: abs(pair[1] - pair[0]))


def _decide(entry: Entry, of: str, old: float, new: float, spread: float, known: bool) -> Change:
    """Judge a change against the spread; if the spread is not known, the verdict is "undecided"."""
    verdict = "slower" if new - old > spread else "faster" if old - new > spread else "same"
    return _change(entry, verdict if known else "undecided", of, old, new)


def _change(
    entry: Entry, verdict: str, of: str = "", old: float | None = None, new: float | None = None
) -> Change:
    return Change(entry["fullname"], columns.label(entry), entry["group"], verdict, of, old, new)
