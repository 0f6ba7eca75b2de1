"""Attention as a part of a network: softmax(q k^T / sqrt(D)) v, forward and backward, on any of its rungs.

`GPT(config, attention="s6_causal")` attends on a rung. What it keeps for the backward pass is one number a
query, the log of its softmax's sum. A rung without a backward pass of its own gets that of its ladder's last
rung, or of the CPU ladder's, in float32: all need the same numbers.

Shapes: B batch, H heads, T queries, S keys, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist import kernels
from minidist.comm.opaque import opaque, refuse_recorded
from minidist.kernels.attention_rung import AttentionRung
from minidist.kernels.cuda import attention as cuda
from minidist.kernels.rung import dtype_name
from minidist.model.matmul import check_operand


@opaque
def attention(q: Tensor, k: Tensor, v: Tensor, rung: AttentionRung, *, causal: bool = False) -> Tensor:
    """Attend from q (B, H, T, D) to k and v (B, H, S, D) on `rung`; with `causal`, up to the own position.

    Returns (B, H, T, D). A backward pass with create_graph=True raises NotImplementedError. Raises TypeError
    for no rung of attention, for arguments that are not tensors, and for dtypes that differ or that the rung
    does not take; ValueError for shapes that do not fit, and for tensors on another device than the rung's.
    """
    check_rung("rung", rung)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_operand(name, tensor, rung)
    mixed: Tensor = _Attention.apply(q, k, v, rung, causal)  # type: ignore[no-untyped-call]
    return mixed


def check_rung(name: str, rung: object) -> None:
    """Raise TypeError unless the argument with this name is a rung of attention."""
    if not isinstance(rung, AttentionRung):
        raise TypeError(
            f"{name} is {rung!r}; give a rung of attention, such as named('s6_causal') of {__name__}"
        )


@dataclass(frozen=True)
class Attend:
    """The `attend` of a GPT's blocks, on a rung. Raises TypeError for no rung, ValueError for dropout.

    A rung that takes float32 gets 16-bit numbers widened to it, as from a ring.
    """

    rung: AttentionRung
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_rung("attention", self.rung)
        self._check_dropout(self.dropout)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Attend causally, and return the dtype of the queries."""
        self._check_dropout(dropout)
        widens = query.dtype.itemsize == 2 and "float32" in self.rung.dtypes
        q, k, v = (x.float() if widens else x for x in (query, key, value))
        return attention(q, k, v, self.rung, causal=True).to(query.dtype)

    def _check_dropout(self, dropout: float) -> None:
        if dropout > 0:
            raise ValueError(
                f"dropout is {dropout}, and rung {self.rung.name} drops no attention weights; set it to "
                "0, or leave the rung out"
            )


def check_dtypes(model: nn.Module) -> None:
    """Raise TypeError for a block whose rung does not take the dtype that the block computes in."""
    for name, block in model.named_modules():
        attend, weight = getattr(block, "attend", None), next(block.parameters(), None)
        if not isinstance(attend, Attend) or weight is None:
            continue
        takes, dtype = attend.rung.dtypes, dtype_name(weight.dtype)
        if dtype not in takes and ("float32" not in takes or weight.dtype.itemsize != 2):
            raise TypeError(
                f"{name} computes in {dtype}, but rung {attend.rung.name} takes {' or '.join(takes)}; give "
                "the layout another precision, or the model another rung of attention"
            )


def named(name: str) -> AttentionRung:
    """Return a rung of the CPU ladder, or by its full name of the CUDA ladder. Raises as `kernels.rung`."""
    return cuda.load(name) if name in cuda.RUNGS else kernels.rung(name, kernels.ATTENTION_LADDER)


def on_rung(rung: AttentionRung, *inputs: Tensor, causal: bool) -> list[Tensor]:
    """Return the result and its logs from q, k and v, or their gradients if out, logs and d_out follow."""
    q, step = inputs[0], rung
    if len(inputs) > 3:
        last = kernels.CUDA_ATTENTION_LADDER[-1] if rung.device == "cuda" else rung
        able = [each for each in (rung, last) if each.gradients and dtype_name(q.dtype) in each.dtypes]
        step = [*able, kernels.ATTENTION_LADDER[-1]][0]
    compute: Any = step.forward if len(inputs) == 3 else step.backward
    if step.device == "cuda":
        return list(compute(*(x.detach() for x in inputs), causal=causal))
    found = compute(*(x.detach().cpu().float().numpy() for x in inputs), causal=causal)
    return [torch.from_numpy(x).to(q.device) for x in found]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rung: AttentionRung, causal: bool) -> Tensor:
        out, logs = on_rung(rung, q, k, v, causal=causal)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.rung, ctx.causal = rung, causal
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_recorded("attention on a rung", "leave the rung out")
        q, *given = ctx.saved_tensors
        found = on_rung(ctx.rung, q, *given, d_out, causal=ctx.causal)
        return *(x.to(q.dtype) for x in found), None, None
