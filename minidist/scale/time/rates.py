"""How fast a rank works through the parts of a step, and how ranks that share cores slow each other down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minidist.comm.cost.links import LinkProfile
from minidist.scale.time.layer_work import Computation


@dataclass(frozen=True)
class Rates:
    """What one rank attains."""

    flops: Mapping[str, float]  # operations a second in matrix products, by precision
    attention: float  # of that, the share that attention's products attain
    moved: float  # bytes a second that operators between the products move
    memory: float  # bytes a second of the main memory, which the optimizer's state comes from
    call: float  # seconds of calling an operator
    backward_call: float  # the same in a backward pass, which Python has no part in
    tensor: float  # seconds that a parameter takes in an update, whatever its size
    step: float = 0.0  # seconds of a step that are in none of these
    asynchronous: bool = False  # whether calls are hidden behind the work of those before, as on a GPU

    def seconds(self, work: Computation, precision: str, backward: bool = False) -> float:
        """Of a pass: products and what lies between them one after the other."""
        rate = self.flops[precision]
        products = max(
            work.products / rate + work.attention / (rate * self.attention), work.operands / self.moved
        )
        busy = products + work.moved / self.moved
        calls = work.calls * (self.backward_call if backward else self.call)
        return max(busy, calls) if self.asynchronous else busy + calls

    def scaled(self, factor: float) -> Rates:
        """The same where everything takes `factor` times as long."""
        return replace(
            self,
            flops={name: rate / factor for name, rate in self.flops.items()},
            moved=self.moved / factor,
            memory=self.memory / factor,
            call=self.call * factor,
            backward_call=self.backward_call * factor,
            tensor=self.tensor * factor,
            step=self.step * factor,
        )


@dataclass(frozen=True)
class Crowd:
    """Ranks of one host that all work at once: what was measured for so many."""

    ranks: int
    rates: Rates
    links: LinkProfile | None  # between them; None for one rank
    alone: float = 1.0  # seconds of a pass while the others wait, over those while all work

    def pace(self, working: float, cores: int) -> float:
        """Seconds of a pass while `working` of the ranks work, over those while all do.

        Ranks beyond the cores take turns; up to the cores they slow each other down through memory only.
        """
        if self.ranks == 1:
            return 1.0
        working = min(max(working, 1.0), float(self.ranks))
        if self.ranks <= cores:
            return self.alone + (1 - self.alone) * (working - 1) / (self.ranks - 1)
        if working >= cores:
            return working / self.ranks
        full = cores / self.ranks
        return self.alone + (full - self.alone) * (working - 1) / max(cores - 1, 1)


@dataclass(frozen=True)
class Hardware:
    """Machines that ranks run on: what is published of them, and what a rank attains of it.

    Attributes:
        crowds: for numbers of ranks on a host what was measured while all worked; empty for machines that are
            known from their data sheets, where each rank has a device of its own.
    """

    name: str
    source: str  # of the published figures
    peak: Mapping[str, float]  # operations a second of one rank's device, by precision
    attained: float  # share of the peak that the products of a transformer reach
    attained_source: str
    memory: int  # bytes of one rank's device
    bandwidth: float  # bytes a second of its memory
    ranks_per_host: int
    inside: LinkProfile  # links between ranks of one host
    between: LinkProfile  # links between hosts, of one rank's share of the network cards
    overlaps: bool = True  # messages travel while the device computes
    rates: Rates | None = None
    cores: int | None = None  # that the ranks of a host share; None where each has its own device
    crowds: Mapping[int, Crowd] = field(default_factory=dict)

    def crowd(self, ranks: int) -> Crowd:
        """What holds for so many ranks on a host: as measured, or scaled from the nearest number measured."""
        if not self.crowds:
            assert self.rates is not None
            return Crowd(ranks, self.rates, self.inside)
        if ranks in self.crowds:
            return self.crowds[ranks]
        nearest = min(self.crowds, key=lambda known: (abs(math.log(known / ranks)), known))
        found, cores = self.crowds[nearest], self.cores or 1
        # Ranks beyond the cores take turns, and so does everything that each does.
        slower = max(ranks, cores) / max(nearest, cores)
        links = found.links or next((c.links for c in self.crowds.values() if c.links), None)
        return Crowd(ranks, found.rates.scaled(slower), links, found.alone / slower)
