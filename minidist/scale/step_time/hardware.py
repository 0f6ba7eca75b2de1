"""Machines: one rank's rates, ranks that share cores, and the figures of data sheets by name.

>>> hardware("h100").memory
80000000000

machines.json has the figures, what each means, and their sources. `attained`, the share of the peak that
large products reach, is set so that a whole step agrees with a published training on that device;
`tests/scale/step_time/test_step_time.py` checks that. minidist does not run on TPUs and Trainium; a plan for
one is for the library that the machine `needs`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minidist._names import unknown
from minidist.comm.cost.links import PROFILES, Link, LinkProfile
from minidist.scale.step_time.layer_work import Computation


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
        flops = {name: rate / factor for name, rate in self.flops.items()}
        rates = {name: getattr(self, name) / factor for name in ("moved", "memory")}
        times = {name: getattr(self, name) * factor for name in ("call", "backward_call", "tensor", "step")}
        return replace(self, flops=flops, **rates, **times)


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


def _machine(name: str, sheet: dict[str, Any]) -> Hardware:
    """A machine from its entry in machines.json, with the defaults filled in."""
    bandwidth, call, domain = sheet["bandwidth"], sheet["call"], sheet["domain"]
    attained = {
        precision: sheet.get(f"attained_in_{precision}", sheet["attained"]) for precision in sheet["peak"]
    }

    def links(figures: Any, where: str, hop: float) -> LinkProfile:
        if isinstance(figures, str):
            return PROFILES[figures]
        messages = Link(hop, 1 / figures["bytes_per_second"])
        add = 3 / bandwidth  # a sum reads two operands and writes one
        return LinkProfile(figures.get("name", where), figures["source"], {"messages": messages}, add)

    rates = Rates(
        {precision: attained[precision] * peak for precision, peak in sheet["peak"].items()},
        sheet["attention"],
        moved=sheet["moved"] * bandwidth,
        memory=sheet["moved"] * bandwidth,
        call=call,
        backward_call=sheet.get("backward_call", call),
        tensor=sheet["tensor"],
        asynchronous=sheet["asynchronous"],
    )
    same = ("source", "peak", "attained", "attained_source", "bandwidth", "ranks_per_host", "domain", "needs")
    return Hardware(
        name,
        memory=int(sheet["memory"]),
        inside=links(sheet["inside"], f"inside a {domain} of {name}", sheet["hop"]),
        between=links(sheet["between"], f"between {domain}s of {name}", sheet["network_hop"]),
        rates=rates,
        **{field: sheet[field] for field in same},
    )


_READ = json.loads(Path(__file__).with_name("machines.json").read_text(encoding="utf-8"))
HARDWARE = {name: _machine(name, {**_READ["defaults"], **own}) for name, own in _READ["machines"].items()}
"""Machines by name."""


def hardware(name: str | Hardware) -> Hardware:
    """The machine of that name, or the `Hardware` given. A ValueError suggests the nearest known name."""
    if isinstance(name, Hardware):
        return name
    if name not in HARDWARE:
        raise unknown("hardware profile", name, HARDWARE)
    return HARDWARE[name]


def smallest(memory: int) -> Hardware:
    """The GPU with the least memory that has `memory` bytes; the largest GPU if none has."""
    gpus = [each for each in HARDWARE.values() if each.rates and each.rates.asynchronous and not each.needs]
    enough = [each for each in gpus if each.memory >= memory]
    if not enough:
        return max(gpus, key=lambda each: (each.memory, each.peak["fp16"]))
    return min(enough, key=lambda each: (each.memory, -each.peak["fp16"]))
