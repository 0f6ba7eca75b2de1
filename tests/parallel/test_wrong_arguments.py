"""Arguments of wrong types to what cuts a model: one sentence that names the value and the remedy."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.comm.mesh import Mesh
from minidist.model import MLP
from minidist.parallel import schedules
from minidist.parallel.context_parallel.attention_in_a_ring import ring_attention, ring_bytes
from minidist.parallel.debugging.compare import differences
from minidist.parallel.sequence_share.sequence_share import SequenceShare
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from tests.helpers.refusals import refuses

X = torch.zeros(1, 2, 4, 3)
Y = torch.zeros(4, dtype=torch.int64)
RING = partial(ring_attention, X, X, X)
BYTES = partial(ring_bytes, batch=1, key_heads=1, head_size=1)


def net() -> nn.ModuleDict:
    return nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})


def engine() -> Any:
    return md.prepare(MLP((4, 3)), partial(torch.optim.SGD, lr=0.1))


def compared(batches: Any, **options: Any) -> object:
    return md.compare(engine(), engine(), batches, **options)


test_a_mistake_is_one_sentence = refuses(
    lambda call: call(),
    (lambda: ring_attention(None, X, X), TypeError, "q, k and v are NoneType, Tensor, Tensor; give"),  # type: ignore[arg-type]
    (lambda: RING(length=4.0), TypeError, "length is 4.0 (float); give an integer, the positions"),
    (lambda: RING(length="4"), TypeError, "length is '4' (str); give an integer"),
    (lambda: RING(length=-4), "length is -4; give at least 0, the positions of the whole"),
    (lambda: RING(tile=1.5), TypeError, "tile is 1.5 (float); give an integer, the keys"),
    (lambda: RING(tile="a"), TypeError, "tile is 'a' (str); give an integer"),
    (lambda: RING(scale="x"), TypeError, "scale is 'x'; give a number"),
    (lambda: RING(group=3), TypeError, "group is 3; give a process group"),
    (lambda: BYTES(8, 0, 0), "rank is 0 of 0; give at least 1 rank"),
    (lambda: BYTES(8, 2, 5), "rank is 5 of 2; give"),
    (lambda: SequenceShare(0), TypeError, "group is 0; give a process group"),  # type: ignore[arg-type]
    (lambda: parallelize(net(), None), TypeError, "plan is None; give a dictionary"),  # type: ignore[arg-type]
    (lambda: parallelize(net(), [("up", "column")]), TypeError, "plan is [('up',"),  # type: ignore[arg-type]
    (lambda: parallelize(net(), "up"), TypeError, "plan is 'up'; give"),  # type: ignore[arg-type]
    (lambda: parallelize(net(), {3: "column"}), TypeError, "names 3; give names"),  # type: ignore[dict-item]
    (lambda: parallelize(None, {}), TypeError, "module is None; give a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: parallelize(net(), {}, group="x"), TypeError, "group is 'x'; give"),  # type: ignore[arg-type]
    (lambda: compared(None), TypeError, "batches is a NoneType; give a list of pairs"),
    (lambda: compared(5), TypeError, "batches is a int; give a list of pairs"),
    (lambda: compared([X]), TypeError, "batch 0 is a Tensor, not a pair"),
    (lambda: compared((X[0, 0], Y)), TypeError, "batch 0 is a Tensor, not a pair"),
    (lambda: compared([(X, Y)], repeats=-1), "repeats is -1; give"),
    (lambda: compared([(X, Y)], repeats=1.5), TypeError, "repeats is 1.5 (float); give"),
    (lambda: differences(None, None), TypeError, "a is a NoneType; give"),  # type: ignore[arg-type]
    (lambda: md.Layout.parse(None), TypeError, "the layout is None; give text"),  # type: ignore[arg-type]
    (lambda: md.Layout.parse("dp=²"), "dp is '²'; give a whole number"),
    (lambda: md.Layout.parse("dp=--2"), "dp is '--2'; give a whole number"),
    (lambda: schedules.by_name([], 2, 2), "unknown schedule []: "),  # type: ignore[arg-type]
    (lambda: Mesh().group(["tp"]), "unknown axis ['tp']: "),  # type: ignore[arg-type]
    (lambda: comm.all_reduce(X, group=3), TypeError, "group is 3; give"),  # type: ignore[call-overload]
    (lambda: comm.barrier(group=[]), TypeError, "group is []; give"),  # type: ignore[call-overload]
    (lambda: comm.send(X, 0, group="x"), TypeError, "group is 'x'; give"),  # type: ignore[call-overload]
    (lambda: copy.deepcopy(engine()), TypeError, "an engine cannot be copied, since"),
    literal=True,
)


def test_an_engines_model_can_be_copied() -> None:
    own = engine()
    own.step(X[0, 0][:, :1].expand(4, 4), Y)
    twin = copy.deepcopy(own.model)
    assert all(map(torch.equal, twin.parameters(), own.model.parameters()))
