"""This rank's part of a model, and of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from minidist.comm.mesh import Mesh
from minidist.model.loss import cross_entropy
from minidist.parallel.context.sequence_share import SequenceShare
from minidist.parallel.contract.batch import mapped, rows_of, split, tensors
from minidist.parallel.contract.engine import Loss
from minidist.parallel.engine.parameter_placement import Placement
from minidist.parallel.tensor.vocabulary import gather_logits, vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Tied:
    """A parameter of which several stages of a pipeline hold a copy."""

    name: str | None  # on this rank; None if it has no copy
    stages: tuple[int, ...]


@dataclass(frozen=True)
class RankModel:
    """This rank's part of a model."""

    model: nn.Module  # the part, with the whole's names
    mesh: Mesh  # of all ranks
    placement: Placement  # where its parameters lie in the whole
    share: SequenceShare | None  # of the tokens; None without cp
    stages: tuple[nn.Module, ...]  # the modules of this rank's pipeline chunks; empty without pp
    tied: tuple[Tied, ...]  # parameters whose gradients are summed over stages
    vocabulary: int | None  # its size if outputs are this rank's part of the logits; None if they are whole

    def loss(self, loss: Loss, outputs: Any, targets: Any) -> Any:
        """Call a loss or a metric with this rank's outputs.

        If the ranks share the logits, `cross_entropy` becomes `vocab_parallel_cross_entropy`; for any other
        function the logits are gathered, which sends more.
        """
        if self.vocabulary is None:
            return loss(outputs, targets)
        if loss is cross_entropy:
            group = self.mesh.group("tp")
            return vocab_parallel_cross_entropy(outputs, targets, group, self.vocabulary)
        return loss(self.whole(outputs), targets)

    def whole(self, outputs: Any) -> Any:
        """Outputs with all logits, if the ranks share them: the "logits", or else the first tensor."""
        if self.vocabulary is None:
            return outputs
        named = isinstance(outputs, Mapping) and "logits" in outputs
        logits: Tensor = outputs["logits"] if named else next(x for _, x in tensors(outputs))
        gathered = gather_logits(logits, self.mesh.group("tp"), self.vocabulary)
        return mapped(lambda x: gathered if x is logits else x, outputs)

    def cut(self, inputs: Any, targets: Any) -> tuple[Any, Any, float]:
        """This rank's tokens of its rows, (B, T) each, and their share of all tokens."""
        if self.share is None:
            return inputs, targets, 1.0
        found = [*tensors(inputs, "inputs"), *tensors(targets, "targets")]
        if any(x.dim() < 2 or x.shape[:2] != found[0][1].shape[:2] for _, x in found):
            each = " and ".join(f"{name} {tuple(x.shape)}" for name, x in found).replace(" ", " are ", 1)
            raise ValueError(
                f"{each}, and cp={self.share.ranks} cuts rows of tokens; give (B, T) and a target for each "
                "token, or a layout with cp=1"
            )
        x = mapped(self.share.cut, inputs)
        return x, x if targets is inputs else mapped(self.share.cut, targets), self.share.part


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of a global batch, or a micro-batch of it."""

    inputs: Any
    targets: Any  # the inputs themselves if the batch is one
    rows: int
    share: float = 1.0  # of the rows' tokens
    counts: float = 1.0  # 0 for a batch that only takes part in what ranks do together

    @property
    def weight(self) -> float:
        """Over how much its loss is a mean, if the loss does not say."""
        return self.rows * self.share * self.counts

    def split(self, parts: int) -> list[RankBatch]:
        """So many micro-batches, or one for each row if there are fewer."""
        parts = min(parts, self.rows)
        if parts <= 1:
            return [self]
        inputs = split(self.inputs, parts)
        targets = inputs if self.targets is self.inputs else split(self.targets, parts)
        pairs = zip(inputs, targets, strict=True)
        return [replace(self, inputs=x, targets=y, rows=rows_of(x)) for x, y in pairs]
