"""What real ranks send and hold, to hold a dry run to: functions that ranks run, and the comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist import comm
from minidist.comm.ledgers import Call
from minidist.model import GPT, GPTConfig, TransformerConfig, config
from minidist.model.mixture_of_experts import Router
from minidist.parallel.contract.memory_report import Memory
from minidist.scale.dryrun.one_rank import OPTIMIZERS, DryRun, dryrun

SAME = ("name", "dtype", "shape", "group", "bytes_sent")
"""What is compared of a call; which way it went, and how long it took, is the machine's."""


@dataclass(frozen=True)
class Case:
    """A training, real or dry."""

    layout: str
    rows: int = 8
    tokens: int = 16
    optimizer: str = "adamw"
    way: str = "torch"
    clip_norm: float | None = 1.0
    blocks: int = 2
    heads: int = 4
    width: int = 32
    tied: bool = True
    model: str = ""  # a name, in place of a shape of its own
    dropout: float = 0.0
    secondary: int | None = None
    experts: int = 0

    @property
    def options(self) -> dict[str, Any]:
        shard = None if self.secondary is None else {"secondary": self.secondary}
        return {"clip_norm": self.clip_norm, "fully_shard": shard}

    @property
    def shape(self) -> TransformerConfig:
        if self.model:
            return config(self.model)
        sizes = {"layers": self.blocks, "heads": self.heads, "width": self.width}
        rest = {"tied": self.tied, "dropout": self.dropout, "experts": self.experts}
        rest["balance_rate"] = 0.01 if self.experts else 0.0
        return GPTConfig(vocabulary=61, context=self.tokens, **sizes, **rest)

    @property
    def parsed(self) -> md.Layout:
        return md.Layout.parse(self.layout)

    def dry(self, rank: int) -> DryRun:
        batch = self.rows, self.tokens
        return dryrun(self.shape, self.parsed, batch, rank, self.optimizer, way=self.way, **self.options)


@dataclass(frozen=True)
class Measured:
    """One rank's calls before the first step, in it and in the second; its memory after that."""

    calls: tuple[list[tuple[Any, ...]], ...]
    memory: Memory


def plain(calls: Sequence[Call]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(call, name) for name in SAME) for call in calls]


@contextmanager
def experts_in_turns() -> Iterator[None]:
    """Inside, tokens take a block's experts in turns, so that all get as many."""

    def choose(router: Router, scores: Tensor) -> Tensor:
        tokens, k = len(scores), router.experts_per_token
        return torch.arange(tokens * k).view(tokens, k) % len(router.weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "choose", choose)
        yield


def measure(case: Case) -> Measured:
    """On each rank of a cluster."""
    with comm.using(case.way), experts_in_turns():
        found = []
        with comm.ledger() as ledger:
            make = OPTIMIZERS[case.optimizer]
            engine = md.prepare(GPT(case.shape), make, case.parsed, **case.options)
        found.append(plain(ledger.calls))
        own = range(engine.data_rank, case.rows, engine.data_ranks)
        generator = torch.Generator().manual_seed(engine.data_rank)
        inputs, targets = torch.randint(0, 61, (2, len(own), case.tokens), generator=generator)
        for _ in range(2):
            with comm.ledger() as ledger:
                engine.step(inputs, targets)
            found.append(plain(ledger.calls))
        return Measured(tuple(found), engine.memory())


def differences(dry: DryRun, real: Measured) -> list[str]:
    """What a dry run says that was not measured; nothing where it is right."""
    found = []
    for phase, mine, theirs in zip(
        ("prepare", "first step", "step"), (dry.prepare, dry.first_step, dry.calls), real.calls, strict=True
    ):
        would, did = Counter(plain(mine)), Counter(theirs)
        found += [f"{phase}: {count} times too often {call}" for call, count in (would - did).items()]
        found += [f"{phase}: {count} times left out {call}" for call, count in (did - would).items()]
    for field in fields(Memory):
        would, did = getattr(dry.memory, field.name), getattr(real.memory, field.name)
        if abs(would - did) > 0.05 * did:
            found.append(f"{field.name}: {would} bytes would be held, and {did} are")
    return found


def wrong(run: Callable[..., list[Measured]], case: Case, ranks: Sequence[int] | None = None) -> list[str]:
    """Where dry runs of these ranks, or all, differ from measured ones."""
    real = run(measure, case)
    return [
        f"{case.layout}, rank {rank}: {each}"
        for rank in (range(len(real)) if ranks is None else ranks)
        for each in differences(case.dry(rank), real[rank])
    ]
