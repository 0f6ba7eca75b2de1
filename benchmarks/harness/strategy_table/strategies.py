"""The table of strategies, as data: every kind of training in minidist, each with its peers.

A row is a layout for `md.prepare` with options, or the name of a training loop without an engine
(`strategy_loops.py`). Peers are loops of other libraries that do the same work (`peers.py`). The rows of a
family are measured in turns with each other, their peers, and plain training in one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from minidist.benchmarks.harness.steps.training_steps import SEED
from minidist.model.configs import GPTConfig, config
from minidist.model.data import dataset
from minidist.model.gpt import GPT
from minidist.model.mlp import MLP
from minidist.model.sampler import Sampler
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import SCHEDULES, ScheduleKind

YARDSTICK = "plain torch"
"""Training in one process with all cores of the machine: every row is measured in turns with it."""
OFFLOAD = {"fully_shard": {"offload": "a folder of its own"}}
"""Options of the row that keeps its shards and the optimizer's state in files."""
SECONDARY = {"fully_shard": {"secondary": 2}}
"""Options of the row in which two neighbours keep a second copy of the parameters."""
OUTSIDE = {"Accelerate": "accelerate", "DeepSpeed": "deepspeed"}
"""Peers from packages of their own: the first word of the peer's name, and the module to import."""
BATCHES = 4
"""Number of different global batches; training repeats them."""
EVERY = 4
"""Steps of local SGD between two averages."""


@dataclass(frozen=True)
class Work:
    """The work of a training step: a model, and the rows of a global batch."""

    model: str
    rows: int

    def build(self) -> nn.Module:
        """Build the model, the same on every rank; a GPT is untied, since some peers can't tie weights."""
        if self.model == "mlp":
            return MLP((64, 512, 512, 512, 10), seed=SEED)
        shape = config(self.model, tied=False)
        assert isinstance(shape, GPTConfig)
        return GPT(shape, seed=SEED)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the global batches, the same on every rank."""
        if self.model == "mlp":
            data = dataset("digits")
        else:
            data = dataset("bytes", length=config(self.model).context, limit=self.rows * BATCHES)
        sampler = Sampler(len(data.train), self.rows, drop_last=True, seed=SEED)
        return [data.train[sampler.share(step)] for step in range(BATCHES)]


@dataclass(frozen=True)
class Row:
    """A strategy in a layout, and the peers that it is compared with."""

    strategy: str
    layout: str  # for `Layout.parse`, or in words for a loop
    family: str  # rows of one family are measured together
    peers: tuple[str, ...] = ()  # names in `peers.PEERS`
    loop: str = ""  # a name in `strategy_loops.LOOPS`; if empty, the row uses an engine
    options: dict[str, Any] = field(default_factory=dict)  # for `md.prepare`
    loop_ranks: int = 2
    exact: bool = True  # has the losses of one process, up to rounding
    gpt_only: bool = False
    full_only: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.loop_ranks if self.loop else Layout.parse(self.layout).ranks

    @property
    def label(self) -> str:
        """The row's name, with the number of ranks if that is more than two."""
        return self.strategy if self.ranks in (1, 2) else f"{self.strategy}, {self.ranks} ranks"

    @property
    def period(self) -> int:
        """Number of steps after which the communication pattern repeats."""
        return EVERY if self.loop == "local SGD" else 1


def _data_parallel(form: str, peer: str = "torch DDP", exact: bool = True, **options: Any) -> Row:
    """Make the row of a form of data parallelism; quick runs of `bench_training` measure all forms."""
    given = {"data_parallel": options} if options else {}
    quick = form in ("an all-reduce a parameter", "overlap", "PowerSGD")
    return Row(
        f"data parallel, {form}",
        "dp=2",
        "data parallel",
        (peer,),
        options=given,
        exact=exact,
        full_only=not quick,
    )


def _pipeline(name: str, kind: ScheduleKind) -> Row:
    layout = Layout(pp=2, micro_batches=4, schedule=name, chunks=kind.least_chunks)
    peers = (f"torch {kind.torch_name}",) if kind.torch_name else ()
    return Row(f"pipeline, {kind.title}", str(layout), "pipeline", peers)


ROWS = (
    Row("one process", "dp=1", "one process", ("plain torch",)),
    Row("recompute", "recompute=True", "one process", ("torch checkpoint",)),
    _data_parallel("an all-reduce a parameter", bucket_mb=0, overlap=False),
    _data_parallel("buckets", overlap=False),
    _data_parallel("overlap"),
    _data_parallel("overlap, ring over sockets", algorithm="ring"),
    _data_parallel("float16", "torch DDP, float16 hook", exact=False, compression="float16"),
    _data_parallel("bfloat16", exact=False, compression="bfloat16"),
    _data_parallel("top 1%", exact=False, compression="topk"),
    _data_parallel("PowerSGD", "torch DDP, PowerSGD hook", exact=False, compression="powersgd"),
    Row("data parallel, overlap", "dp=2", "Accelerate", ("Accelerate",), full_only=True),
    Row(
        "local SGD",
        f"dp=2, every {EVERY} steps",
        "asynchronous",
        ("torch PostLocalSGD",),
        loop="local SGD",
        exact=False,
    ),
    Row(
        "parameter server, synchronous",
        "1 server, 2 workers",
        "asynchronous",
        loop="synchronous server",
        loop_ranks=3,
    ),
    Row(
        "parameter server, asynchronous",
        "1 server, 2 workers",
        "asynchronous",
        loop="asynchronous server",
        loop_ranks=3,
        exact=False,
    ),
    Row("layer by layer", "pp=2", "pipeline", loop="layer by layer"),
    *(_pipeline(name, kind) for name, kind in SCHEDULES.items()),
    Row("tensor parallel", "tp=2", "tensor", ("torch parallelize_module",)),
    Row(
        "tensor and sequence parallel",
        "tp=2,sequence_parallel=True",
        "tensor",
        ("torch parallelize_module, SequenceParallel",),
        gpt_only=True,
    ),
    Row("context parallel", "cp=2", "tensor", ("torch DDP",), gpt_only=True),
    Row("ZeRO-1", "dp=2,zero=1", "ZeRO", ("torch ZeroRedundancyOptimizer",)),
    Row("ZeRO-2", "dp=2,zero=2", "ZeRO", ("torch fully_shard, parameters kept",)),
    Row("ZeRO-3", "dp=2,zero=3", "ZeRO", ("torch fully_shard",)),
    Row("ZeRO-3, offload", "dp=2,zero=3", "ZeRO", options=OFFLOAD),
    Row(
        "data parallel, recompute", "dp=2,recompute=True", "ZeRO", ("torch DDP, checkpoint",), full_only=True
    ),
    *(
        Row(f"ZeRO-{stage}", f"dp=2,zero={stage}", "DeepSpeed", (f"DeepSpeed ZeRO-{stage}",), full_only=True)
        for stage in (1, 2, 3)
    ),
    Row("data parallel, overlap", "dp=4", "hybrid", ("torch DDP",)),
    Row("ZeRO-2", "dp=4,zero=2", "hybrid", ("torch fully_shard, parameters kept",), full_only=True),
    Row("ZeRO-3", "dp=4,zero=3", "hybrid", ("torch fully_shard",), full_only=True),
    Row("hybrid ZeRO-1", "dp=4,zero=1,shard=2", "hybrid", full_only=True),
    Row("hybrid ZeRO-3", "dp=4,zero=3,shard=2", "hybrid"),
    Row("ZeRO-3, secondary shares", "dp=4,zero=3", "hybrid", options=SECONDARY, full_only=True),
    Row("data and tensor parallel", "dp=2,tp=2", "hybrid"),
    Row("data and tensor parallel, ZeRO-1", "dp=2,tp=2,zero=1", "hybrid", full_only=True),
    Row(
        "data and tensor parallel, ZeRO-3",
        "dp=2,tp=2,zero=3",
        "hybrid",
        ("torch fully_shard and tensor",),
        full_only=True,
    ),
    Row("data parallel and pipeline", "dp=2,pp=2,micro_batches=2", "hybrid"),
    Row("tensor parallel and pipeline", "tp=2,pp=2,micro_batches=4", "hybrid", full_only=True),
    Row("data and context parallel", "dp=2,cp=2", "hybrid", gpt_only=True, full_only=True),
    Row(
        "data and tensor parallel and pipeline, ZeRO-1",
        "dp=2,tp=2,pp=2,zero=1,micro_batches=2",
        "eight ranks",
        full_only=True,
    ),
)
"""All rows, grouped by family, in the order of measurement."""


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
