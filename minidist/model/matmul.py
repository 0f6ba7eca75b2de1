"""Matmul as a part of a network: a product and a linear layer that run forward and backward on any rung.

If y = x w and g is the gradient of the loss by y, the gradients by x and w are products too: g w^T and x^T g.
So a linear layer needs only one rung: `Linear(64, 10, rung="s4_loop_order")`. Tensors and the rung's
arrays share memory, and w^T and x^T are views with swapped strides, so nothing is copied.

Shapes: x (..., k), w (k, n), y (..., n); inside, x is (m, k).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from minidist import kernels
from minidist.kernels import Rung
from minidist.kernels.rung import Step


def matmul(x: Tensor, w: Tensor, rung: Rung) -> Tensor:
    """Multiply x (..., k) by w (k, n) on `rung`, and return y (..., n) in their dtype.

    The gradients by x and w also run on the rung, each only if it is needed; a backward pass with
    create_graph=True raises NotImplementedError. If no view arranges the rows of x as a matrix, x is copied.
    Raises TypeError for arguments that are not tensors, and for dtypes that differ or that the rung does not
    take; ValueError for shapes that do not multiply, and for tensors on another device than the rung's.
    """
    check_operand("x", x, rung)
    check_operand("w", w, rung)
    if x.dtype != w.dtype:
        raise TypeError(
            f"x is {x.dtype} and w is {w.dtype}; convert one with .to(), so that both are the same"
        )
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} and w of shape {tuple(w.shape)} do not multiply; "
            "give x (..., k) and w (k, n), with the same k"
        )
    # Count the rows: reshape cannot infer their number if another size is 0.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: Tensor = _Product.apply(rows, w, rung)  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], w.shape[1])


def check_operand(name: str, tensor: Tensor, rung: Step) -> None:
    """Raise TypeError or ValueError unless the rung takes what `tensor` is, in its dtype, on its device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor; pass torch.as_tensor({name})")
    # A CUDA rung also takes CPU tensors: its emulator works on them, and a GPU gets copies.
    if tensor.device.type not in ("cpu", rung.device):
        raise ValueError(
            f"{name} is on {tensor.device}, but rung {rung.name} runs on {rung.device}; "
            f"move the tensor with .to({rung.device!r}), or take a rung for {tensor.device.type}"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in rung.dtypes:
        raise TypeError(
            f"{name} has dtype {dtype}, but rung {rung.name} takes {' or '.join(rung.dtypes)}; "
            f"convert it with .to(torch.{rung.dtypes[0]})"
        )


class Linear(nn.Module):
    """y = x W^T + b, as torch.nn.Linear, on a rung: x (..., in_features) -> y (..., out_features).

    >>> Linear(64, 10, rung="s7_threads")

    weight (out_features, in_features) and bias (out_features,) are drawn as torch.nn.Linear draws them,
    uniformly within 1 / sqrt(in_features), by `generator` if given. rung: a rung, or its name as for
    `kernels.rung`; "s8_matrix_unit" rounds float32 to bf16, so an element of y or a gradient is off by up to
    1/128 of the sum of its products' sizes. Raises ValueError for a negative size or an unknown name.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rung: Rung | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if in_features < 0 or out_features < 0:
            raise ValueError(
                f"in_features is {in_features} and out_features is {out_features}; neither may be negative"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.rung = kernels.rung(rung) if isinstance(rung, str) else rung
        if not isinstance(self.rung, Rung):
            raise TypeError(f"rung is {rung!r}; give a rung or its name, such as 's4_loop_order'")
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """Multiply on the rung, then add the bias."""
        y = matmul(x, self.weight.T, self.rung)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """The text between the brackets of print(layer)."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, rung={self.rung.name}"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rung: Rung) -> Tensor:  # (m, k), (k, n) -> (m, n)
        x_needs_grad, w_needs_grad, _ = ctx.needs_input_grad
        # Each gradient needs the other factor; keep only a factor that some gradient needs.
        ctx.save_for_backward(x if w_needs_grad else None, w if x_needs_grad else None)
        ctx.rung = rung
        ctx.w_is_transposed = w.stride(0) < w.stride(1)
        return _multiply(rung, x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # g: (m, n)
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "this backward pass is recorded for second derivatives (create_graph=True), and a product on "
                "a rung has none; leave the rung out"
            )
        x, w = ctx.saved_tensors
        x_grad = w_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _multiply(ctx.rung, g, w.T)  # (m, k)
        if ctx.needs_input_grad[1]:
            # (k, n), in w's memory order (Linear passes weight.T), so that it becomes .grad without a copy.
            w_grad = _multiply(ctx.rung, g.T, x).T if ctx.w_is_transposed else _multiply(ctx.rung, x.T, g)
        return x_grad, w_grad, None


def _multiply(rung: Rung, a: Tensor, b: Tensor) -> Tensor:
    if rung.device == "cuda" or a.dtype == torch.bfloat16:  # NumPy has no bf16: rung 8 takes tensors
        return rung.matmul(a.detach(), b.detach())
    return torch.from_numpy(rung.matmul(a.detach().numpy(), b.detach().numpy()))
