"""Muon: each hidden matrix moves by its momentum made orthogonal; AdamW updates everything else.

A gradient of a matrix is often of low rank: a few directions have most of its norm. Newton-Schulz iterations
bring all singular values of the momentum close to 1, with products of matrices alone, so that every direction
learns. Embeddings, heads, biases and norms stay with AdamW.

The update looks at a whole matrix, so each has an owner among the ranks that share the state: with ZeRO 1 and
2 buckets deal whole matrices, with ZeRO 3 sharding/optimizer/whole_on_owners.py brings them there. With
tensor parallelism each rank keeps its part of a matrix and of the momentum; an all-to-all brings the parts of
a matrix to one of the ranks, which orthogonalizes it, and another one takes the result back. For a matrix of
S bytes on n ranks that is 2 (n - 1) / n S over all ranks together. Orthogonalizing each part by itself would
send nothing, and would be another optimizer.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (the iteration and its
coefficients); Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2 (weight decay).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils.weak import WeakIdRef

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.flat.bucket_layout import longest_first, matrix_work, whole_shape
from minidist.parallel.flat.joined_messages import exchange
from minidist.parallel.flat.ranges import narrowed

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: they raise small singular values fast, and end between 0.7 and 1.2."""
NOT_HIDDEN = (
    r"(^|[._])(emb(ed|edding|edder|d)?s?\d*|wte|wpe|tokens?|positions?|segments?|head|classifier)([._]|$)"
    r"|^layers\.\d+\.output\."
)
"""Finds the names of matrices that are not hidden: embeddings, and what predicts from the last layer. Words
stand between dots and underscores. Its last part is for this package's GPT."""
STACKS = r"(^|[._])(experts|moe)[._]"
"""Finds the names of stacks of matrices. Others of three dimensions, such as a Conv1d's weight, are none."""


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """The matrix with its singular values close to 1. (..., m, n): each matrix of a stack by itself."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    x = stack.mT if is_tall else stack  # (k, m, n) with m <= n
    wide = torch.promote_types(x.dtype, torch.float32)  # a float16 ends at 65,504
    x = (x / torch.linalg.matrix_norm(x, keepdim=True, dtype=wide).clamp(min=1e-7)).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT  # (k, m, m)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape)


def is_hidden(name: str, parameter: Tensor, others: str = NOT_HIDDEN) -> bool:
    """Whether Muon takes a parameter: a matrix, or experts' stack, whose name `others` does not find."""
    is_one = parameter.dim() == 2 or (parameter.dim() == 3 and re.search(STACKS, name) is not None)
    return is_one and parameter.numel() > 0 and not re.search(others, name)


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices, and AdamW for the rest.

    >>> engine = md.prepare(model, partial(md.Muon, lr=0.02, adamw_lr=3e-4), md.Layout(dp=4, zero=1))

    Its matrices are the parameters of two dimensions, and experts' stacks of three, but for those whose names
    match `others`. Without names it takes all matrices. Groups choose: {"params": [...]} is for Muon, also
    with stacks, and {"params": [...], "elementwise": True} for AdamW.

    Args:
        named_parameters: (name, parameter) pairs, as `prepare` passes them; or parameters, or groups.
        lr, momentum, nesterov: of Muon. A matrix with more rows than columns moves further, by the root of
            rows / columns.
        steps: of the iteration.
        adamw_lr, betas, eps: of AdamW; adamw_lr None for lr / 10.
        weight_decay: of both, decoupled.
        others: a regular expression that finds the names of matrices for AdamW.
        dtype: in which matrices are orthogonalized; None for bfloat16 on GPUs, which is enough and many times
            faster, where the momentum is float32, and otherwise for the momentum's own.
    """

    joins_cuts, work = True, staticmethod(matrix_work)
    tp_group: Group = None  # the ranks that have parts of the same matrices; set by the engine

    def __init__(
        self,
        named_parameters: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        others: str = NOT_HIDDEN,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.adamw_lr = lr / 10 if adamw_lr is None else adamw_lr
        numbers = {"lr": lr, "adamw_lr": self.adamw_lr, "weight_decay": weight_decay, "eps": eps}
        fractions = {"momentum": momentum, **{f"betas[{i}]": beta for i, beta in enumerate(betas)}}
        for name, value in {**numbers, "steps": steps, **fractions}.items():
            if not 0 <= value < (1 if name in fractions else math.inf):
                below = f", and a {name} below 1" if name in fractions else ""
                raise ValueError(f"{name} is {value}; give at least 0{below}")
        given = [*named_parameters]
        groups = [each for each in given if isinstance(each, dict)]
        if not groups:
            pairs = [each if isinstance(each, tuple) else ("", each) for each in given]
            hidden = [is_hidden(name, p, others) for name, p in pairs]
            for elementwise in (False, True):  # both, also where one is empty: stages have as many groups
                own = [p for (_, p), each in zip(pairs, hidden, strict=True) if each != elementwise]
                groups.append({"params": own, "elementwise": elementwise})
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "steps": steps, "betas": betas}
        defaults |= {"eps": eps, "weight_decay": weight_decay, "elementwise": False}
        self.dtype, self._cuts = dtype, dict[tuple[Any, ...], list[list[Any]]]()
        super().__init__(groups, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: torch's own, and what it leaves out. They learn anew how matrices are cut."""
        return {**super().__getstate__(), "adamw_lr": self.adamw_lr, "dtype": self.dtype, "_cuts": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; ValueError if there are some for Muon that are no matrices."""
        own = {"lr": self.adamw_lr} if param_group.get("elementwise") else {}
        super().add_param_group({**own, **param_group})
        group = self.param_groups[-1]
        for shape in [p.shape for p in group["params"] if not (group["elementwise"] or 2 <= p.dim() <= 3)]:
            raise ValueError(
                f"a group for Muon has a parameter of shape {tuple(shape)}, which is neither a matrix nor a "
                'stack of some; give it in a group of its own, {"params": [...], "elementwise": True}'
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the loss that `closure` computes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            (self._adamw if group["elementwise"] else self._muon)(group, given)
        return loss

    def _adamw(self, group: dict[str, Any], given: list[Tensor]) -> None:
        for p in given:
            if not self.state[p]:
                moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                self.state[p] = {"step": torch.tensor(0.0), **moments}
        grads: list[Any] = [p.grad for p in given]
        keys = "exp_avg", "exp_avg_sq", "step"
        averages, squares, counts = ([self.state[p][key] for p in given] for key in keys)
        options: dict[str, Any] = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        adamw(given, grads, averages, squares, [], counts, amsgrad=False, maximize=False, **options)

    def _muon(self, group: dict[str, Any], given: list[Tensor]) -> None:
        cut = []
        for p in given:
            state, grad = self.state[p], p.grad
            assert grad is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            on_gpu = update.is_cuda and update.dtype == torch.float32
            update = update.to(self.dtype or (torch.bfloat16 if on_gpu else update.dtype))
            if hasattr(p, "tp_cut"):
                cut.append((p, update.clone() if update is momentum else update))
            else:
                _move(p, orthogonalized(update, group["steps"]), group)
        if cut:
            self._orthogonalize_cut(cut, group["steps"])
        for p, update in cut:
            _move(p, update, group)

    def _orthogonalize_cut(self, cut: list[tuple[Any, Tensor]], steps: int) -> None:
        """Orthogonalize updates of matrices that tp cut, each on one of the ranks that have parts of it."""
        like, rank = cut[0][1], rank_in(self.tp_group)
        cuts = self._cuts_of_all([p for p, _ in cut], like.device)
        owner_of = longest_first([self.work(p.tp_cut.shape) for p, _ in cut], [0.0] * len(cuts))
        wholes = {
            k: like.new_zeros(cut[k][0].tp_cut.shape) for k, owner in enumerate(owner_of) if owner == rank
        }
        own: list[list[Tensor]] = [[] for _ in cuts]  # this rank's parts, by the matrices' owners
        for (p, update), owner in zip(cut, owner_of, strict=True):
            own[owner] += [narrowed(update, start, p.tp_cut.sizes) for start, _ in p.tp_cut.boxes()]
        parts = [  # all ranks' parts of the matrices that this rank owns
            [narrowed(whole, at, those[k].sizes) for k, whole in wholes.items() for _, at in those[k].boxes()]
            for those in cuts
        ]
        exchange(own, parts, like, self.tp_group)
        for whole in wholes.values():
            whole.copy_(orthogonalized(whole, steps))
        exchange(parts, own, like, self.tp_group)

    def _cuts_of_all(self, matrices: list[Any], device: torch.device) -> list[list[Any]]:
        """How the matrices are cut on every rank of tp, which tell each other once: 8 bytes a number.

        All ranks find the same ones, or none does: two matrices may have equal parts on some ranks alone.
        """
        if (key := tuple(map(WeakIdRef, matrices))) not in self._cuts:
            own = [p.tp_cut for p in matrices]
            numbers = torch.tensor([x for cut in own for x in (*cut.offsets, *cut.sizes)], device=device)
            rows = comm.all_gather(numbers, group=self.tp_group).view(len(ranks_of(self.tp_group)), -1)
            self._cuts[key] = [
                [
                    cut._replace(offsets=offsets, sizes=sizes)
                    for cut in own
                    for offsets, sizes in [[tuple(islice(row, len(cut.shape))) for _ in range(2)]]
                ]
                for row in map(iter, rows.tolist())
            ]
        return self._cuts[key]


def _move(p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    """Let a matrix, or this rank's part of one, decay and go against an orthogonal update."""
    rows, columns = whole_shape(p)[-2:]
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
