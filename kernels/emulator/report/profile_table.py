"""The profile of a kernel: its counts as figures, and as a table of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..machine.counts import SECTOR, Counts, LineCounts


@dataclass(frozen=True)
class Profile:
    """The counts of one launch. `print(profile)` shows a table; programs read the attributes."""

    counts: Counts
    kernel: str

    @property
    def total(self) -> LineCounts:
        """The sum over all lines: requests, sectors, bytes, shared passes, matrix instructions."""
        return self.counts.total

    @property
    def instructions(self) -> dict[str, int]:
        """Warp instructions by class, the most frequent first."""
        return dict(self.counts.classes.most_common())

    @property
    def lines(self) -> dict[str, LineCounts]:
        """The counts of each line of source, by "file:line"."""
        return dict(self.counts.lines)

    @property
    def sectors_per_load(self) -> float:
        """32-byte sectors for each warp's load from global memory: 4 for neighbouring 4-byte words."""
        return _ratio(self.total.load_sectors, self.total.loads)

    @property
    def sectors_per_store(self) -> float:
        """32-byte sectors for each warp's store to global memory."""
        return _ratio(self.total.store_sectors, self.total.stores)

    @property
    def load_efficiency(self) -> float:
        """Bytes that threads read over bytes moved: 1 is perfect; shared sectors give more."""
        return _ratio(self.total.load_bytes, self.total.load_sectors * SECTOR)

    @property
    def shared_conflicts(self) -> int:
        """Passes through shared memory beyond those of conflict-free requests."""
        return self.total.shared_passes - self.total.shared_least

    def table(self) -> str:
        """Return all figures as text."""
        total, counts, copied = self.total, self.counts, self.counts.copied_bytes
        shared = f"{total.shared_requests}, {total.shared_passes} passes, {self.shared_conflicts} conflicts"
        rows = [
            ("warp instructions", f"{total.instructions}"),
            ("global loads", _requests(total.loads, total.load_sectors, total.load_bytes)),
            ("global stores", _requests(total.stores, total.store_sectors, total.store_bytes)),
            ("shared requests", _or_none(total.shared_requests, shared)),
            ("copied into shared memory", _or_none(copied, f"{copied} bytes, asynchronously")),
            ("matrix instructions", _or_none(total.matrix, f"{total.matrix}, {counts.matrix_flops} FLOP")),
        ]
        width = max(len(name) for name, _ in rows)
        text = [f"{self.kernel}", *(f"  {name:<{width}}  {value}" for name, value in rows), "  by class"]
        text += [f"    {name:<{width}}{count}" for name, count in self.instructions.items()]
        text.append("  by line: instructions, sectors per load, sectors per store, shared passes per request")
        for location, line in sorted(self.lines.items(), key=lambda item: _order(item[0])):
            parts = [
                f"{line.instructions:>9}",
                _cell(line.load_sectors, line.loads),
                _cell(line.store_sectors, line.stores),
                _cell(line.shared_passes, line.shared_requests),
            ]
            text.append(f"    {Path(location).name:<{width}}{'  '.join(parts)}")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()


def _order(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _ratio(above: int, below: int) -> float:
    return above / below if below else 0.0


def _cell(above: int, below: int) -> str:
    return f"{above / below:>7.2f}" if below else f"{'-':>7}"


def _or_none(count: int, text: str) -> str:
    return text if count else "none"


def _requests(count: int, sectors: int, asked: int) -> str:
    if not count:
        return "none"
    moved = sectors * SECTOR
    return f"{count}, {sectors} sectors ({sectors / count:.2f} each), {moved} bytes moved for {asked} asked"
