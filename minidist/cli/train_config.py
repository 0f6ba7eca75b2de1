"""What the commands train, compare and trace run on: `TrainConfig`, and the model and engine it describes.

Two runs with equal descriptions train on the same batches from the same weights, whatever their layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist._arguments import check_whole
from minidist._names import unknown
from minidist.cli.own_model import function, is_own, require_data
from minidist.model import (
    BERT,
    CONFIGS,
    GPT,
    MLP,
    BERTConfig,
    Dataset,
    GPTConfig,
    Rows,
    dataset,
    masked,
)
from minidist.model import config as shape_of
from minidist.model.loss import cross_entropy, masked_cross_entropy
from minidist.parallel.contract.layout import Layout, check_available
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.engine.prepare import prepare
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.training.clipping import check_max_norm
from minidist.scale.dryrun.one_rank import OPTIMIZERS
from minidist.scale.memory.training_setup import check_divisible, refuse_cut_rows

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEFAULT_MODEL = {"digits": "mlp", "bytes": "byte-tiny"}
MODELS = ("mlp", *(name for name, shape in CONFIGS.items() if shape.generates))
BERT_ROW = 128
"""Bytes in a row of a BERT."""
HIDDEN = 128
"""Width of the MLP's hidden layer."""
MLP_LAYERS = 2
DIGITS = 1437
"""Rows of the digits to train on."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run; making one raises ValueError for what is unknown or does not fit."""

    data: str = "digits"  # or "bytes", or a function's name, as in own_model.py
    # "mlp" for digits; a GPT's name for bytes; your own; None for the data's default.
    model: str | None = None
    layout: Layout = field(default_factory=Layout)
    steps: int = 230  # global batches; on the digits, 230 of 64 rows are ten epochs
    batch: int = 64  # rows of a global batch, over all data-parallel ranks
    learning_rate: float = 3e-3
    optimizer: str = "adamw"
    rung: str | None = None  # of matmul for the MLP, of attention for a GPT; None for torch's own
    dtype: str = "float32"
    seed: int = 0  # of the weights and of the order of rows
    clip_norm: float | None = None  # the largest norm that gradients may have; None for any
    loss: str | None = None  # a function's name; None for cross entropy
    save: str | None = None  # a folder for checkpoints, from which a stopped run continues
    save_every: int = 50  # steps from one checkpoint to the next; the end is saved as well
    keep: int = 3  # how many of the newest checkpoints to keep
    resume: bool = True  # continue from the newest whole checkpoint; False refuses a folder that has some

    def __post_init__(self) -> None:
        own = is_own(self.model)
        for what, name, known in (
            ("data set", self.data, DEFAULT_MODEL),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("dtype", self.dtype, DTYPES),
            ("model", self.model_name, MODELS),
        ):
            if name not in known and not (own and what in ("data set", "model")):
                raise unknown(what, name, known)
        if own:
            function("--model", str(self.model))
            function("--data", require_data(str(self.model), self.data))
        if self.loss is not None:
            function("--loss", self.loss)
        if not own and (self.data == "digits") != (self.model_name == "mlp"):
            texts = f"a GPT, such as {DEFAULT_MODEL['bytes']}, or a BERT, such as bert-tiny-mlm"
            fitting = "the mlp" if self.data == "digits" else texts
            raise ValueError(f"the model {self.model_name} cannot train on {self.data}; give {fitting}")
        if self.rung is not None:
            from minidist.kernels import ATTENTION_LADDER, rung

            if self.model_name != "mlp" and not isinstance(CONFIGS.get(self.model_name), GPTConfig):
                raise ValueError(
                    f"a rung ({self.rung}) is for the mlp or a GPT, and the model is {self.model_name}; "
                    "leave the rung out, or train one of these"
                )
            rung(self.rung, None if self.model_name == "mlp" else ATTENTION_LADDER)
        for what in ("steps", "batch", "save_every", "keep"):
            check_whole(what, getattr(self, what), 1)
        check_whole("seed", self.seed)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if self.clip_norm is not None:
            check_max_norm("clip_norm", self.clip_norm)
        if not isinstance(self.layout, Layout):
            raise TypeError(f"layout is {self.layout!r}; give a Layout, such as Layout(dp=2)")
        check_available(self.layout)
        shape = CONFIGS.get(self.model_name)
        if shape is not None:
            refuse_cut_rows(shape, self.layout)
            check_divisible(shape, self.layout)
        elif not own:
            _check_mlp(self.layout, self.batch)
        if self.layout.precision != "fp32" and self.dtype != "float32":
            raise ValueError(
                f"precision={self.layout.precision} needs dtype float32, and dtype is {self.dtype}; leave "
                "one of them out"
            )
        if self.batch < self.layout.dp:
            raise ValueError(
                f"a global batch of {self.batch} rows is too small for {self.layout.dp} data-parallel ranks; "
                "give each at least one row, or use fewer ranks"
            )

    @property
    def model_name(self) -> str:
        """The model's name, by default the data's model."""
        return self.model or DEFAULT_MODEL.get(self.data, "")

    @property
    def description(self) -> dict[str, str | int | float | None]:
        """Settings, besides the ranks, that change the losses; equal in all runs that continue each other."""
        names = ("data", "batch", "learning_rate", "optimizer", "rung", "dtype", "seed", "clip_norm")
        described = {name: getattr(self, name) for name in names}
        own = {} if self.loss is None else {"loss": self.loss}
        plain = {"momentum": 0.0} if self.optimizer == "sgd" else {}  # tells it from what "sgd" was before
        return {"model": self.model_name, "precision": self.layout.precision, **described, **plain, **own}

    @property
    def masks(self) -> bool:
        """Whether the model is a BERT, which learns to guess masked bytes."""
        return isinstance(CONFIGS.get(self.model_name), BERTConfig)

    def converted(self, inputs: Tensor) -> Tensor:
        """Inputs in the training's dtype; bytes stay integers."""
        return inputs.to(DTYPES[self.dtype]) if inputs.is_floating_point() else inputs


def _check_mlp(layout: Layout, batch: int) -> None:
    """ValueError if ranks cannot share the MLP so, or the digits have fewer rows than the batch."""
    for axis, wrong, lacks in (
        ("cp", layout.cp > 1, "attention"),
        ("sequence_parallel", layout.sequence_parallel, "attention"),
        ("ep", layout.ep > 1, "experts"),
    ):
        if wrong:
            raise ValueError(
                f"{axis} is {getattr(layout, axis)} in the layout, and the mlp has no {lacks}; leave it out, "
                f"or train a model with {lacks}"
            )
    if layout.pp * layout.chunks > MLP_LAYERS:
        raise ValueError(
            f"pp is {layout.pp} with chunks={layout.chunks} in the layout, and the mlp has {MLP_LAYERS} "
            "layers; give each part at least one, or train a GPT"
        )
    if layout.tp > HIDDEN:
        raise ValueError(
            f"tp is {layout.tp} in the layout, and the mlp's hidden layer has {HIDDEN} features; give at "
            "most so many"
        )
    if batch > DIGITS:
        raise ValueError(f"batch is {batch}, and digits has {DIGITS} rows; give at most so many")


def config_of(model: str, layout: Layout, data: str | None = None, **fields: Any) -> TrainConfig:
    """The description for "mlp", which learns digits, a GPT of bytes ("gpt" is the smallest), or your own."""
    if is_own(model):
        return TrainConfig(require_data(model, data), model, layout, **fields)
    name = DEFAULT_MODEL["bytes"] if model == "gpt" else model
    return TrainConfig("digits" if model == "mlp" else "bytes", name, layout, **fields)


def build(config: TrainConfig) -> tuple[nn.Module, Dataset]:
    """Build the model, on this rank's device, and the data."""
    if is_own(config.model):
        return _own(config)
    dtype, device = DTYPES[config.dtype], comm.device()
    if config.masks:
        shape = shape_of(config.model_name, vocabulary=257, context=BERT_ROW)  # bytes, and the mask
        found = dataset("bytes", length=BERT_ROW)
        train, test = (masked(rows, 256, config.seed) for rows in (found.train, found.test))
        bert = BERT(shape, seed=config.seed, dtype=dtype, device=device)
        return bert, Dataset(found.name, train, test, found.classes)
    if config.model_name != "mlp":
        shape = shape_of(config.model_name, vocabulary=256)  # of bytes, whatever the name's text was
        assert isinstance(shape, GPTConfig)
        if config.rung is not None:  # on the CPU, as the mlp below
            device = torch.device("cpu")
        model = GPT(shape, seed=config.seed, dtype=dtype, device=device, attention=config.rung)
        return model, dataset("bytes", length=shape.context)
    data, linear = dataset("digits"), nn.Linear
    if config.rung is not None:
        from minidist.kernels import rung
        from minidist.model.matmul import Linear

        linear = partial(Linear, rung=rung(config.rung))  # type: ignore[assignment]
        if rung(config.rung).device == "cpu":  # a CUDA rung's products would cross the bus
            device = torch.device("cpu")
    sizes = (data.train.inputs.shape[1], HIDDEN, data.classes)
    return MLP(sizes, seed=config.seed, dtype=dtype, device=device, linear=linear), data


def loss_of(config: TrainConfig) -> Loss:
    """The loss to train with: your own, that of masked tokens for a BERT, or cross entropy."""
    if config.loss is not None:
        return function("--loss", config.loss)
    return masked_cross_entropy if config.masks else cross_entropy


def engine_of(config: TrainConfig, model: nn.Module, data: Dataset, **more: Any) -> Engine:
    """Make the engine; `more` are further arguments of `prepare`."""
    optimizer: Any = partial(OPTIMIZERS[config.optimizer], lr=config.learning_rate)  # type: ignore[call-arg]
    example = config.converted(data.train[:1][0])  # a pipeline runs the model on it once to find its layers
    loss, clip_norm = loss_of(config), config.clip_norm
    return prepare(model, optimizer, config.layout, loss, clip_norm=clip_norm, example=example, **more)


def _own(config: TrainConfig) -> tuple[nn.Module, Dataset]:
    """Build a model of your own. The last tenth of its rows is held out."""
    from minidist.scale.dryrun.own_model import require_module, require_rows

    torch.manual_seed(config.seed)
    model = require_module(config.model_name, function("--model", config.model_name)())
    inputs, targets = require_rows(config.model_name, function("--data", config.data)())
    held_out = max(1, len(inputs) // 10)
    train, test = (Rows(inputs[part], targets[part]) for part in (slice(-held_out), slice(-held_out, None)))
    if config.dtype != "float32":
        model.to(DTYPES[config.dtype])
    classes = 0 if targets.is_floating_point() else int(targets.max()) + 1
    return model.to(comm.device()), Dataset(config.data, train, test, classes)
