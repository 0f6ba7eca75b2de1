"""The description of a machine: published figures, one rank's rates, and ranks that share cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minidist.comm.cost.links import LinkProfile
from minidist.scale.time.layer_work import Computation


@dataclass(frozen=True)
class Rates:
    """The rates that one rank attains."""

    flops: Mapping[str, float]  # operations per second in matrix products, by precision
    attention: float  # rate of attention's products, as a share of `flops`
    moved: float  # bytes per second that operators between the products move
    memory: float  # bytes per second of main memory, from which the optimizer reads its state
    call: float  # seconds to call an operator
    backward_call: float  # the same in a backward pass, which does not involve Python
    tensor: float  # seconds per parameter in an update, whatever its size
    step: float = 0.0  # other seconds per step
    asynchronous: bool = False  # calls overlap the work of earlier calls, as on a GPU

    def seconds(self, work: Computation, precision: str, backward: bool = False) -> float:
        """Seconds of a pass: its products and everything between them, one after the other."""
        rate = self.flops[precision]
        products = max(
            work.products / rate + work.attention / (rate * self.attention), work.operands / self.moved
        )
        busy = products + work.moved / self.moved
        calls = work.calls * (self.backward_call if backward else self.call)
        return max(busy, calls) if self.asynchronous else busy + calls

    def scaled(self, factor: float) -> Rates:
        """Rates at which everything takes `factor` times as long."""
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
    """Figures for a number of ranks on one host that all work at once."""

    ranks: int
    rates: Rates
    links: LinkProfile | None  # between these ranks; None for one rank
    alone: float = 1.0  # seconds of a pass while the other ranks wait, over those while all work

    def pace(self, working: float, cores: int) -> float:
        """Seconds of a pass while `working` of the ranks work, over those while all work.

        If there are more ranks than cores, they take turns; otherwise they only share the memory's bandwidth.
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
    """A kind of machine: its published figures, and the rates that a rank attains on it."""

    name: str
    source: str  # of the published figures
    peak: Mapping[str, float]  # operations per second of one rank's device, by precision
    attained: float  # share of the peak that the products of a transformer reach
    attained_source: str
    memory: int  # bytes of one rank's device
    bandwidth: float  # bytes per second of its memory
    ranks_per_host: int  # ranks that `inside` joins: those of a host, or of a TPU's pod
    inside: LinkProfile  # links between ranks of one host
    between: LinkProfile  # links between hosts: one rank's share of the network cards
    overlaps: bool = True  # messages travel while the device computes
    rates: Rates | None = None
    cores: int | None = None  # shared by the ranks of a host; None if each rank has its own device
    domain: str = "host"  # what `inside` joins
    needs: str = ""  # the library that trains on it, if minidist does not
    # Measured figures by number of ranks on a host; empty for machines known from data sheets.
    crowds: Mapping[int, Crowd] = field(default_factory=dict)

    def crowd(self, ranks: int) -> Crowd:
        """Figures for so many ranks on a host, at most all of its ranks.

        They are measured, or scaled from the nearest measured number.
        """
        ranks = min(ranks, self.ranks_per_host)
        if not self.crowds:
            assert self.rates is not None
            return Crowd(ranks, self.rates, self.inside)
        if ranks in self.crowds:
            return self.crowds[ranks]
        nearest = min(self.crowds, key=lambda known: (abs(math.log(known / ranks)), known))
        found, cores = self.crowds[nearest], self.cores or 1
        # With more ranks than cores, everything takes as many times longer as there are ranks per core.
        slower = max(ranks, cores) / max(nearest, cores)
        links = found.links or next((c.links for c in self.crowds.values() if c.links), None)
        return Crowd(ranks, found.rates.scaled(slower), links, found.alone / slower)
