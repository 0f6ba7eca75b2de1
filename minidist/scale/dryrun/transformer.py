"""A transformer of this package, as the planner and the dry run see it: known by its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.parallel.contract.layout import Layout, check_available
from minidist.scale.memory.estimates import Estimate, estimate_setup
from minidist.scale.memory.training_setup import (
    BatchSize,
    TrainingSetup,
    check_divisible,
    named_shape,
    refuse_cut_rows,
    rows_and_tokens,
)
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.prediction import Simulated, StepTime, check_fits, predict_setup

if TYPE_CHECKING:
    from torch import Tensor, nn

    from minidist.parallel.contract.user_functions import Loss
    from minidist.parallel.engine.training_step import Engine
    from minidist.scale.dryrun.fake_tensors import DryTensors
    from minidist.scale.dryrun.fake_world import Form
    from minidist.scale.dryrun.own_model import OwnModel


@dataclass(frozen=True)
class Transformer:
    """The shape of a GPT or BERT, with the same methods as `OwnModel`, which documents them."""

    shape: TransformerConfig
    name: str

    def recomputes(self, policy: bool | str) -> bool:
        """Whether it has the parts that a policy recomputes, and they can be."""
        return True

    @property
    def experts(self) -> int:
        """How many experts a block has; 0 for none that ranks can share."""
        return self.shape.experts

    def parameters(self) -> int:
        """Elements of all parameters, each once."""
        return self.shape.parameters()

    def rows_and_tokens(self, batch: BatchSize) -> tuple[int, int]:
        """The rows of a batch, at least one, and the tokens in each."""
        return rows_and_tokens(self.shape, batch, 1)

    def has_time(self, layout: Layout) -> bool:
        """Whether the time of a step can be predicted."""
        return True

    def check(self, setup: TrainingSetup, hardware: Hardware) -> None:
        """ValueError if `prepare` would refuse the layout, a step the batch, or the machine the precision."""
        layout = setup.layout
        check_available(layout)
        refuse_cut_rows(self.shape, layout)
        check_divisible(self.shape, layout)
        check_fits(self.shape, setup, hardware)

    def estimate(self, setup: TrainingSetup) -> Estimate:
        """Estimate the bytes on the fullest rank."""
        return estimate_setup(self.shape, setup)

    def predict(
        self,
        setup: TrainingSetup,
        hardware: Hardware,
        simulated: Simulated | None = None,
        bound: bool = False,
    ) -> StepTime:
        """Predict the time of a step, or a bound below it without simulating a pipeline."""
        return predict_setup(self.shape, setup, hardware, simulated, bound)

    # A dry run.

    def check_dry(self, layout: Layout) -> None:
        """ValueError if the layout divides the tokens of a BERT, or experts cannot take all tokens."""
        refuse_cut_rows(self.shape, layout)
        capacity = getattr(self.shape, "capacity", None)
        if capacity is not None and capacity < 1:
            raise ValueError(
                f"capacity is {capacity}, so that experts drop tokens, and a dry run does not know which; "
                "give at least 1, or None"
            )

    @property
    def divided(self) -> tuple[int, ...]:
        """The sizes that tensor parallelism divides."""
        return self.shape.heads, self.shape.vocabulary, 4 * self.shape.width

    def build(self, tensors: DryTensors) -> nn.Module:
        """The whole model without data."""
        from minidist.model.bert import BERT
        from minidist.model.gpt import GPT

        kind = GPT if isinstance(self.shape, GPTConfig) else BERT
        return tensors.emptied(kind(self.shape, device="meta"))

    def batch(self, rows: int, tokens: int, tensors: DryTensors) -> tuple[Tensor, Tensor]:
        """A rank's inputs and targets, without data."""
        import torch

        return tensors.empty((rows, tokens), torch.int64), tensors.empty((rows, tokens), torch.int64)

    def example(self, layout: Layout) -> None:
        """`prepare` knows the layers without an example."""

    @property
    def loss(self) -> Loss:
        """Cross entropy for a model with scores; for a pooler the mean of its output."""
        from minidist.model.loss import cross_entropy

        return cross_entropy if self.shape.generates else lambda outputs, targets: outputs.float().mean()

    def sent_to(self, engine: Engine, tokens: int, tensors: DryTensors, chunk: int, rows: int) -> list[Form]:
        """The stream of activations that one stage sends to the next."""
        import torch

        from minidist.parallel.training.precision import DTYPES

        layout = engine.layout
        outside = tokens // layout.tp if layout.sequence_parallel else tokens
        return [((rows, outside, self.shape.width), DTYPES.get(layout.precision, torch.float32))]


Subject = Union[Transformer, "OwnModel"]
"""What the planner and the dry run ask about memory, time and a rank's part of a model."""


def subject_of(model: object) -> Subject:
    """The model as a `Subject`; TypeError unless it is a shape, a name or a model of your own."""
    if isinstance(model, Transformer):
        return model
    if not isinstance(model, str | TransformerConfig):
        from minidist.scale.dryrun.own_model import OwnModel

        if isinstance(model, OwnModel):
            return model
    return Transformer(*named_shape(model))
