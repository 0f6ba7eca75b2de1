"""A vocabulary cut between ranks: the token table, and a cross entropy that never holds all logits.

The logits, tokens times vocabulary, are the largest activations of a small language model. If each rank has
the scores of its own tokens, a row's softmax needs three numbers from each rank: the largest score, the sum
of the exponentials relative to it, and the target's score if the rank has it.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 ("fuse the output of the parallel GEMM with the cross
entropy loss"). n is the number of ranks, N the rows, V the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist import comm
from minidist.comm.opaque import opaque, refuse_recorded
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.model.loss import require_classes, require_rows
from minidist.parallel.tensor_parallel.cuts import Cut, TensorParallel, own_range
from minidist.parallel.tensor_parallel.linear_layers import ColumnParallelLinear
from minidist.parallel.tensor_parallel.operators import (
    SharedFunction,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_sequence,
)
from minidist.parallel.tensor_parallel.shares import share_of


class VocabParallelEmbedding(TensorParallel):
    """An embedding of which each rank has some rows: integer tokens (...) -> (..., D) on every rank.

    Forward: each rank looks up the tokens that it has, and zeros for the others; `reduce_from_ranks` sums the
    results. Under sequence parallelism `scatter_sequence` sums them, and the result is (..., T / n, D).
    Backward: sends nothing; under sequence parallelism an all-gather. A new table is drawn whole, as by
    `torch.nn.Embedding`, and is that of the group's first rank.

    num_embeddings, embedding_dim, padding_idx: of the whole table. group: the ranks that share it; None for
    all. sequence_parallel: return this rank's share of the sequence. Raises ValueError if there are more
    ranks than rows; a call raises IndexError for a token that is not in the table (on a CPU).
    """

    weight: nn.Parameter  # (V / n, D)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Group = None,
        sequence_parallel: bool = False,
        *,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, dtype=dtype, device=device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = whole.padding_idx
        self.group, self.sequence_parallel = group, sequence_parallel
        self.own = own_range(num_embeddings, group, what="the vocabulary")
        self.draw(whole)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: Group = None, sequence_parallel: bool = False
    ) -> VocabParallelEmbedding:
        """Keep this rank's part of a `torch.nn.Embedding` that is the same on all ranks. Sends nothing."""
        check_embedding(embedding)
        sizes, padding = (embedding.num_embeddings, embedding.embedding_dim), embedding.padding_idx
        layer = cls(*sizes, group, sequence_parallel, padding_idx=padding, device="meta")
        return layer.keep_part(embedding)

    @opaque
    def forward(self, tokens: Tensor) -> Tensor:  # (...) -> (..., D)
        """Look up this rank's tokens, and sum over the ranks."""
        _check_tokens(tokens, self.num_embeddings)
        local, elsewhere = _localise(tokens, self.own)
        padding = self.padding_idx
        padding = None if padding is None or padding not in self.own else padding - self.own.start
        x = functional.embedding(local, self.weight, padding).masked_fill(elsewhere[..., None], 0)
        if self.sequence_parallel:
            return scatter_sequence(x, -2, self.group)
        return reduce_from_ranks(x, self.group)

    def cuts(self) -> dict[str, Cut]:
        """The table is cut by rows."""
        shape = (self.num_embeddings, self.embedding_dim)
        return {"weight": Cut(shape, (self.own.start, 0), (len(self.own), self.embedding_dim))}

    def extra_repr(self) -> str:
        """The text between the brackets of print(layer)."""
        return f"{self.own.start}-{self.own.stop} of {self.num_embeddings}, {self.embedding_dim}"


@opaque
def vocab_parallel_cross_entropy(
    local_logits: Tensor, targets: Tensor, group: Group = None, vocabulary: int | None = None
) -> Tensor:  # (..., V / n), (...) -> ()
    """Return the mean over all rows of -log softmax(logits)[target], from each rank's part of the logits.

    All ranks get the number that `minidist.cross_entropy` gives for the whole logits; float16 and bfloat16
    are first widened to float32. Forward: an all-gather of three numbers for each row, which sends 3 (n - 1)
    N times the bytes of a logit. Backward: sends nothing.

    Args:
        local_logits: (..., V / n), this rank's part of the vocabulary, cut as by `own_range`.
        targets: (...), integers from 0 to V - 1, the same on all ranks.
        group: the ranks that share the logits; None for all.
        vocabulary: V; None to ask the ranks, which sends 8 (n - 1) bytes more.

    Raises ValueError if the shapes do not fit each other or the vocabulary or there are no rows, TypeError if
    targets are not integers, IndexError if a target is not in the vocabulary (on a CPU).
    """
    columns = local_logits.shape[-1] if local_logits.dim() else 0
    if vocabulary is None:
        mine = torch.tensor([columns], device=local_logits.device)
        vocabulary = int(comm.all_gather(mine, group=group).sum())
    own = share_of(vocabulary, rank_in(group), len(ranks_of(group)))
    if len(own) != columns or local_logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"local_logits of shape {tuple(local_logits.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)} and a vocabulary of {vocabulary}, of which this rank has {len(own)}; "
            f"give local_logits (..., {len(own)}) and targets (...)"
        )
    require_classes(targets)
    require_rows(targets)
    _check_tokens(targets, vocabulary)
    if local_logits.dtype in (torch.float16, torch.bfloat16):
        local_logits = local_logits.float()
    rows = local_logits.reshape(-1, columns)
    loss: Tensor = _CrossEntropy.apply(rows, targets.reshape(-1).long(), own, group)
    return loss


class _CrossEntropy(SharedFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, own: range, group: Group) -> Tensor:
        local, elsewhere = _localise(targets, own)  # (N,)
        # Clamp at the smallest number: if all of a rank's scores are -inf, -inf - -inf would be NaN.
        largest = logits.amax(dim=1).clamp(min=torch.finfo(logits.dtype).min)
        exponentials = (logits - largest[:, None]).exp_()
        score = logits.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0)
        mine = torch.stack([largest, exponentials.sum(dim=1), score])
        all_ranks = comm.all_gather(mine, group=group).view(-1, *mine.shape)  # (n, 3, N)
        largests, sums, scores = all_ranks.unbind(dim=1)
        top = largests.amax(dim=0)
        total = (sums * (largests - top).exp()).sum(dim=0)
        softmax = exponentials.mul_(((largest - top).exp() / total)[:, None])
        ctx.save_for_backward(softmax, local, elsewhere)
        return (top + total.log() - scores.sum(dim=0)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_recorded("the loss of logits that ranks share", "write your own loss, which gets all logits")
        softmax, local, elsewhere = ctx.saved_tensors
        scale = grad / len(local)
        target = torch.where(elsewhere, 0.0, -scale)  # (N,)
        return (softmax * scale).scatter_add_(1, local[:, None], target[:, None]), None, None, None


def gather_logits(local_logits: Tensor, group: Group = None, vocabulary: int | None = None) -> Tensor:
    """Return all logits on every rank, (..., V / n) -> (..., V), for a loss that needs them all.

    Sends (n - 1) times the largest part forward, nothing backward. vocabulary: V; None if all parts are
    equal.
    """
    return gather_from_ranks(local_logits, -1, vocabulary, group)


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the vocabulary's size if `model` returns only this rank's part of the logits, else None."""
    for part in model.modules():
        if isinstance(part, ColumnParallelLinear) and part.is_vocabulary:
            return part.out_features
    return None


def check_embedding(embedding: object) -> None:
    """Raise an error if a table cannot be cut: TypeError for its type, ValueError for its options."""
    if not isinstance(embedding, nn.Embedding) or type(embedding).forward is not nn.Embedding.forward:
        raise TypeError(f"a {type(embedding).__name__} cannot be cut by rows; give a torch.nn.Embedding")
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise ValueError(f"an Embedding with {option} cannot be cut between ranks; make it without")


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(end) for end in torch.aminmax(tokens))
        if low < 0 or high >= vocabulary:
            raise IndexError(
                f"tokens range from {low} to {high}, but the vocabulary has {vocabulary}; "
                f"give 0 to {vocabulary - 1}"
            )


def _localise(tokens: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Return the tokens' indices in this rank's part, 0 for tokens of other ranks, and the mask of those."""
    local = tokens - own.start
    elsewhere = (local < 0) | (local >= len(own))
    return local.masked_fill(elsewhere, 0), elsewhere
