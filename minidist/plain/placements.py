"""Placements: find a wrong collective before anything is sent, with one process.

A tensor's placement says what the ranks' tensors have to do with each other. Operations hand placements on,
forward and backward alike; a collective takes one and gives another:

    replicated   the same on all ranks       all_reduce       partial, varying -> replicated
    partial      the whole is their sum      reduce_scatter   partial, varying -> shard
    shard        each rank has its part      all_gather       shard, varying -> replicated
    varying      each rank has its own       broadcast        anything -> replicated

A product of shards that sums over what the ranks share is partial. So is a sum of partial tensors, and a
product of one with replicated tensors. All else is a mistake: a norm of a partial sum, a bias added to one
(it counts n times), an all-reduce of what is replicated (n times too large) or of shards (other parts).
Parameters may drift apart, as in local SGD, if they are replicated at the end.

mistakes/lone_rank.py trains two ranks for two steps, each by itself, with calls that send nothing. What a
rank slices at another place than the other is a shard. The model's sizes are such that ranks share a
dimension if it has one of the SHARED sizes. The ladder has one axis of ranks; so has this page.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SHARED = {15, 7, 210, 12, 48, 8, 112, 98}  # rows, tokens, both; width, 4 widths; rows of micro-batches
LINEAR = re.compile(
    "_?(unsafe_)?view|t|transpose|permute|expand|slice|split.*|select|detach|(un)?squeeze|clone|_to_copy|copy|"
    "cat|stack|sum|constant_pad_nd|neg|add|sub"
)  # what may be done to a partial sum
PRODUCTS = re.compile(
    "mul|mm|bmm|div|embedding_dense_backward|native_layer_norm_backward"
)  # linear in the first
SUMS = re.compile("mm|bmm|sum|mean|nll_loss_forward|embedding_dense_backward|native_layer_norm_backward")
TAKES_NOT = {
    "all_reduce": {"replicated": "the sum is n times too large", "shard": "different parts are added up"},
    "reduce_scatter": {"replicated": "the sum is n times too large"},
    "all_gather": {"replicated": "it is whole", "partial": "nobody adds it up"},
    "all_to_all": {"partial": "nobody adds it up"},
}
GIVES = dict.fromkeys(("all_reduce", "all_gather", "broadcast"), "replicated") | {"reduce_scatter": "shard"}


class Wrong(Exception):
    """A tensor whose use does not take its placement."""


class Placements(TorchDispatchMode):
    """The placements of a rank's tensors. other: those of another rank, which has run before."""

    def __init__(self, rank: int, other: Placements | None = None) -> None:
        super().__init__()
        self.number, self.other, self.aligned = rank, other, True
        self.whole, self.slices = dict[int, str](), dict[int, dict[Any, str]]()  # placements, by storage
        self.events, self.random = list[Any](), list[Tensor]()
        self.calls, self.alive = list[str](), list[Any]()

    def at(self, x: Tensor) -> str:
        """Return a tensor's placement."""
        key, own = x.untyped_storage()._cdata, (x.storage_offset(), x.shape)
        return self.slices.get(key, {}).get(own, self.whole.get(key, "replicated"))

    def put(self, x: Tensor, placement: str) -> Tensor:
        """Give a tensor a placement."""
        self.alive.append(x.untyped_storage())  # or another would get its address
        self.whole[x.untyped_storage()._cdata] = placement
        self.slices.pop(x.untyped_storage()._cdata, None)
        return x

    def look(self, name: str, inputs: list[Tensor]) -> list[str]:
        """Return inputs' placements: they are shards where the other rank has taken other slices."""
        self.events.append((name, [(x.storage_offset(), x.shape) for x in inputs]))
        self.alive += [x.untyped_storage() for x in inputs]
        same = self.other.events[len(self.events) - 1 :][:1] if self.other and self.aligned else []
        self.aligned = bool(same) and same[0][0] == name and len(same[0][1]) == len(inputs)
        for x, (offset, shape) in zip(inputs, same[0][1] if self.aligned else (), strict=False):
            if offset != x.storage_offset() and shape == x.shape and self.at(x) == "replicated":
                self.slices.setdefault(x.untyped_storage()._cdata, {})[x.storage_offset(), x.shape] = "shard"
        return [self.at(x) for x in inputs]

    def wrong(self, sentence: str) -> None:
        """Raise a sentence with the training's line, if there are two ranks and they communicate at all."""
        own = [f for f in traceback.extract_stack() if re.match("<(?!frozen|st)", f.filename)]  # not <stdin>
        lines = [f.lineno for f in own]
        if self.other and self.other.calls:
            raise Wrong(f"rank {self.number}, line {lines[-1] if lines else 'last'}: {sentence}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and place its results; a view shares its storage's placement."""
        name = func.overloadpacket.__name__
        inputs = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        inputs = [x for x in inputs if isinstance(x, Tensor)][: 3 if "nll_loss" in name else None]
        found, results = self.look(name, inputs), func(*args, **(kwargs or {}))
        old = {x.untyped_storage()._cdata for x in inputs if not name.endswith("_")}
        for x in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in old:
                self.put(x, self.rule(name.removesuffix("_"), found, inputs, x))
        return results

    def rule(self, name: str, found: list[str], inputs: list[Tensor], out: Tensor) -> str:
        """Return the placement of an operation's result. Zeros fit with every placement."""
        if name.startswith(("empty", "zero", "new_empty", "new_zeros")):
            return "zero"
        if "rand" in name:
            self.random.append(out.clone())
            theirs = self.other.random[len(self.random) - 1 :] if self.other and self.aligned else []
            return "varying" if theirs and not torch.equal(theirs[0], out) else "replicated"
        if name == "addmm":
            name, found = "add", [found[0], self.rule("mm", found[1:], inputs[1:], out)]
        kinds = {*(found[1:] if name == "copy" else found)} - {"zero"}
        if not kinds or name == "ones_like":
            return "zero" if name != "ones_like" and inputs and LINEAR.fullmatch(name) else "replicated"
        if "partial" in kinds:
            linear = LINEAR.fullmatch(name) and len(kinds) == 1
            of_one = found.count("partial") == 1 and (found[0] == "partial" or name == "mul")
            product = PRODUCTS.fullmatch(name) and of_one and kinds <= {"partial", "replicated"}
            if name in ("add", "sub") and len(kinds) > 1:
                self.wrong(f"a partial sum and a tensor that is {min(kinds - {'partial'})} are added up")
            elif not linear and not product:
                self.wrong(f"{name} takes a partial sum, {[*inputs[0].shape]}, as a whole")
            return "partial"
        if "shard" not in kinds:
            return min(kinds) if len(kinds) == 1 else "varying"
        sizes = {size for x, at in zip(inputs, found, strict=False) if at == "shard" for size in x.shape}
        gone = (sizes & SHARED) - {*out.shape} or (not out.dim() and any(x.dim() == 1 for x in inputs))
        if gone and name.endswith("vector_norm"):
            self.wrong("the norm of a shard is used as the norm of the whole")
        if gone and SUMS.fullmatch(name):
            return "partial"
        return "varying" if re.match("index|bincount", name) else "shard"
