"""The table of strategies, as data: every kind of training in minidist, each with its peers.

A row is a layout for `md.prepare` with options, or the name of a training loop without an engine
(`programs.LOOPS`). Peers are loops of other libraries that do the same work (`peers.py`). The rows of a
family are measured in turns with each other, their peers, and plain training in one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from minidist.benchmarks.harness.training.peers import OUTSIDE
from minidist.benchmarks.harness.training.programs import EVERY
from minidist.benchmarks.harness.training.what_is_trained import MUON
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import SCHEDULES, ScheduleKind

YARDSTICK = "plain torch"
"""Training in one process with all cores of the machine: every row is measured in turns with it."""


@dataclass(frozen=True)
class Row:
    """A strategy in a layout, and the peers that it is compared with."""

    strategy: str
    layout: str  # for `Layout.parse`, or in words for a loop
    family: str = ""  # rows of one family are measured together
    peers: tuple[str, ...] = ()  # names in `peers.PEERS`
    loop: str = ""  # a name in `programs.LOOPS`; if empty, the row uses an engine
    options: dict[str, Any] = field(default_factory=dict)  # for `md.prepare`, or for the loop
    loop_ranks: int = 2
    exact: bool = True  # has the losses of one process, up to rounding
    offload: bool = False  # keeps its shards and the optimizer's state in files
    gpt_only: bool = False
    experts: int = 0  # in each block, also for the peers, and for plain training
    full_only: bool = False
    period: int = 1  # steps after which the communication repeats

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.loop_ranks if self.loop else Layout.parse(self.layout).ranks

    @property
    def label(self) -> str:
        """The row's name, with the number of ranks if that is more than two."""
        return self.strategy if self.ranks in (1, 2) else f"{self.strategy}, {self.ranks} ranks"


def _data_parallel(form: str, peer: str = "torch DDP", exact: bool = True, **options: Any) -> Row:
    """Make the row of a form of data parallelism; quick runs of `bench_training` measure all forms."""
    given = {"data_parallel": options} if options else {}
    full = form not in ("an all-reduce a parameter", "overlap", "PowerSGD")
    name = f"data parallel, {form}"
    return Row(name, "dp=2", peers=(peer,), options=given, exact=exact, full_only=full)


def _server(kind: str, exact: bool) -> Row:
    name, layout = f"parameter server, {kind}", "1 server, 2 workers"
    return Row(name, layout, loop=f"{kind} server", loop_ranks=3, exact=exact)


def _local_sgd(name: str, *peers: str) -> Row:
    layout = f"dp=2, every {EVERY} steps"
    return Row(name, layout, peers=peers, loop=name, exact=False, period=EVERY)


def _pipeline(name: str, kind: ScheduleKind) -> Row:
    layout = Layout(pp=2, micro_batches=4, schedule=name, chunks=kind.least_chunks)
    peers = (f"torch {kind.torch_name}",) if kind.torch_name else ()
    return Row(f"pipeline, {kind.title}", str(layout), peers=peers)


def _row(strategy: str, layout: str, *peers: str, **more: Any) -> Row:
    return Row(strategy, layout, peers=peers, **more)


_full = partial(_row, full_only=True)
"""Make a row that a quick run leaves out."""
SEQUENCE = "torch parallelize_module, SequenceParallel"
FAMILIES = {
    "one process": (
        _row("one process", "dp=1", "plain torch"),
        _row("recompute", "recompute=True", "torch checkpoint"),
        *(_full(f"{name}, emulated", f"precision={name}", exact=False) for name in FP8_RECIPES),
    ),
    "data parallel": (
        _data_parallel("an all-reduce a parameter", bucket_mb=0, overlap=False),
        _data_parallel("buckets", overlap=False),
        _data_parallel("overlap"),
        _data_parallel("overlap, ring over sockets", algorithm="ring"),
        _data_parallel("float16", "torch DDP, float16 hook", exact=False, compression="float16"),
        _data_parallel("bfloat16", exact=False, compression="bfloat16"),
        _data_parallel("top 1%", exact=False, compression="topk"),
        _data_parallel("PowerSGD", "torch DDP, PowerSGD hook", exact=False, compression="powersgd"),
    ),
    "Accelerate": (_full("data parallel, overlap", "dp=2", "Accelerate"),),
    "asynchronous": (
        _local_sgd("local SGD", "torch PostLocalSGD"),
        _local_sgd("DiLoCo"),
        _server("synchronous", exact=True),
        _server("asynchronous", exact=False),
    ),
    "pipeline": (
        _row("layer by layer", "pp=2", loop="layer by layer"),
        *(_pipeline(name, kind) for name, kind in SCHEDULES.items()),
    ),
    "tensor": (
        _row("tensor parallel", "tp=2", "torch parallelize_module"),
        _row("tensor and sequence parallel", "tp=2,sequence_parallel=True", SEQUENCE, gpt_only=True),
        _row("context parallel", "cp=2", "torch DDP", gpt_only=True),
        _row("context parallel, Ulysses", "cp=2,cp_kind=ulysses", "torch DDP", gpt_only=True),
    ),
    "experts": (_row("experts", "dp=2,ep=2", "torch DDP", gpt_only=True, experts=4),),
    "ZeRO": (
        _row("ZeRO-1", "dp=2,zero=1", "torch ZeroRedundancyOptimizer"),
        _row("ZeRO-2", "dp=2,zero=2", "torch fully_shard, parameters kept"),
        _row("ZeRO-3", "dp=2,zero=3", "torch fully_shard"),
        _row("ZeRO-1, Muon", "dp=2,zero=1", options={"optimizer": MUON}, exact=False),
        _row("ZeRO-3, Muon", "dp=2,zero=3", options={"optimizer": MUON}, exact=False),
        _row("ZeRO-3, offload", "dp=2,zero=3", offload=True),
        _full("data parallel, recompute", "dp=2,recompute=True", "torch DDP, checkpoint"),
    ),
    "DeepSpeed": tuple(
        _full(f"ZeRO-{stage}", f"dp=2,zero={stage}", f"DeepSpeed ZeRO-{stage}") for stage in (1, 2, 3)
    ),
    "hybrid": (
        _row("data parallel, overlap", "dp=4", "torch DDP"),
        _full("ZeRO-2", "dp=4,zero=2", "torch fully_shard, parameters kept"),
        _full("ZeRO-3", "dp=4,zero=3", "torch fully_shard"),
        _full("hybrid ZeRO-1", "dp=4,zero=1,shard=2"),
        _row("hybrid ZeRO-3", "dp=4,zero=3,shard=2"),
        _full("ZeRO-3, secondary shares", "dp=4,zero=3", options={"fully_shard": {"secondary": 2}}),
        _row("data and tensor parallel", "dp=2,tp=2"),
        _full("data and tensor parallel, ZeRO-1", "dp=2,tp=2,zero=1"),
        _full("data and tensor parallel, ZeRO-3", "dp=2,tp=2,zero=3", "torch fully_shard and tensor"),
        _row("data parallel and pipeline", "dp=2,pp=2,micro_batches=2"),
        _full("tensor parallel and pipeline", "tp=2,pp=2,micro_batches=4"),
        _full("data and context parallel", "dp=2,cp=2", gpt_only=True),
    ),
    "eight ranks": (
        _full("data and tensor parallel and pipeline, ZeRO-1", "dp=2,tp=2,pp=2,zero=1,micro_batches=2"),
    ),
}
"""The rows of each family, which are measured together."""
ROWS = tuple(replace(row, family=family) for family, rows in FAMILIES.items() for row in rows)
"""All rows, in the order of measurement."""


@dataclass(frozen=True)
class Pair:
    """A line of the table: a row, and one of its peers if it has any."""

    row: Row
    peer: str = ""

    @property
    def label(self) -> str:
        """The row's name, with the peer's if that comes from a package of its own."""
        outside = self.peer.split(" ")[0]
        return f"{self.row.label}, beside {outside}" if outside in OUTSIDE else self.row.label


def pairs(model: str) -> list[Pair]:
    """Return the lines of a model's table."""
    rows = [row for row in ROWS if model != "mlp" or not row.gpt_only]
    return [Pair(row, peer) for row in rows for peer in row.peers or ("",)]
