"""A multi-layer perceptron: a chain of layers, `model.layers`, which a pipeline cuts anywhere.

Source of the first weights: He et al. 2015, "Delving Deep into Rectifiers", section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.seeding import fill, own_parameters

Device = torch.device | str | None


def _he(_: str, weight: Tensor) -> float:
    return math.sqrt(2 / weight.shape[1])


class Dense(nn.Module):
    """One layer of an MLP: a linear map, and a ReLU unless it is the last layer."""

    def __init__(self, linear: nn.Module, relu: bool) -> None:
        super().__init__()
        self.linear = linear
        self.relu = relu
        self.width: int | None = None  # checked of the inputs, if given

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """The linear map, then the ReLU."""
        if self.width is not None and (x.dim() == 0 or x.shape[-1] != self.width):
            raise ValueError(f"inputs are {tuple(x.shape)}; give (..., {self.width}), the MLP's first size")
        x = self.linear(x)
        return functional.relu(x) if self.relu else x


class MLP(nn.Module):
    """A multi-layer perceptron with ReLU between its layers: (..., sizes[0]) -> (..., sizes[-1]).

    linear: makes a layer, called as `linear(inputs, outputs)`;
    `functools.partial(minidist.model.matmul.Linear, rung=...)` runs the network on a rung. The weights do not
    depend on it. Raises ValueError for fewer than two sizes, for a size below 1, and for inputs of another
    width.
    """

    def __init__(
        self,
        sizes: Sequence[int] = (64, 128, 10),
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: Device = None,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes are {tuple(sizes)}; give two or more, each at least 1")
        self.sizes = tuple(sizes)
        pairs = list(zip(self.sizes, self.sizes[1:], strict=False))
        # `linear` may draw weights of its own; fork_rng restores the global random state afterwards.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            made = [Dense(linear(*pair), relu=pair is not pairs[-1]) for pair in pairs]
        made[0].width = self.sizes[0]
        self.layers = nn.ModuleList(made)
        self.to(device=device or torch.get_default_device(), dtype=dtype or torch.get_default_dtype())
        self.seed = seed
        fill(self.named_parameters(), _he, seed=seed)

    def initialize_part(self, part: nn.Module) -> None:
        """Fill a submodule's own parameters, for a model made on "meta" that gets memory part by part."""
        fill(own_parameters(self, part), _he, seed=self.seed)

    def forward(self, x: Tensor) -> Tensor:  # (..., sizes[0]) -> (..., sizes[-1])
        """Run the layers in order."""
        for layer in self.layers:
            x = layer(x)
        return x
