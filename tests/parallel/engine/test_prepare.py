"""prepare: what it refuses, each in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from minidist.parallel.training.precision import LossScale
from tests.conftest import Clusters
from tests.helpers.refusals import refuses
from tests.parallel.guards.test_refusals import BATCH, SGD, meta, net

test_wrong_arguments = refuses(
    lambda **given: md.prepare(**{"model": nn.Linear(1, 1), "optimizer": SGD, "layout": None, **given}),
    ({"model": lambda x: x}, TypeError, "model is a function; give a torch.nn.Module"),
    ({"layout": "dp=2"}, TypeError, "layout is 'dp=2'; give a Layout"),
    ({"layout": md.Layout(dp=2)}, r"needs 2 ranks .* and the world has 1"),
    (
        {"layout": md.Layout(precision="bf16"), "model": nn.Linear(1, 1).double()},
        "precision='bf16' starts from a float32 model, and weight is torch.float64; call model.float",
    ),
    ({"loss_scale": LossScale()}, "loss_scale is for precision='fp16', but the layout has"),
    ({"layout": md.Layout(recompute=True)}, "a Linear has no ModuleList or Sequential"),
    (
        {"loss": lambda outputs, targets, weights: weights},
        TypeError,
        r"<lambda>\(outputs, targets, weights\), and is called with two .*'weights'\. Give one that",
    ),
    ({"rehearse": "frist"}, "rehearse is 'frist'; give True, False, 'first', or None"),
    ({"clip_norm": 0}, "clip_norm is 0; give the largest norm"),
    ({"clip_norm": float("nan")}, "clip_norm is nan; give the largest norm"),
    ({"layout": md.Layout(zero=3), "optimizer": torch.optim.LBFGS}, "LBFGS, which cannot be shared"),
    (
        {"layout": md.Layout(zero=3), "data_parallel": {"bucket_mb": 1}},
        r"data_parallel is \{'bucket_mb': 1\} and the layout has zero=3",
    ),
    (
        {"layout": md.Layout(zero=2), "fully_shard": {"offload": "cpu"}},
        r"fully_shard is \{'offload': 'cpu'\} and the layout has zero=2; its options are for zero=3",
    ),
    (
        {"layout": md.Layout(zero=3), "fully_shard": {"offlaod": "cpu"}},
        "unknown option of fully_shard 'offlaod': did you mean 'offload'",
    ),
    (
        {"layout": md.Layout(zero=3), "fully_shard": {"offload": ""}},
        "offload is '', which names no directory; give False, 'cpu' or a directory",
    ),
    ({"data_parallel": {"bucket": 3}}, "unknown option of data_parallel 'bucket': did you mean"),
    (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        TypeError,
        r"optimizer is a SGD; give a function from parameters to an optimizer",
    ),
    ({"loss": 3}, TypeError, "loss is 3; give a function from outputs and targets"),
    ({"data_parallel": 3}, TypeError, "data_parallel is 3; give a dict of options, such as {'bucket"),
    ({"fully_shard": ["cpu"]}, TypeError, r"fully_shard is \['cpu'\]; give a dict of options"),
    ({"loss_scale": 3}, TypeError, "loss_scale is 3; give a LossScale"),
    ({"model": nn.Tanh()}, "model has nothing to train, since it has no parameters"),
    (
        {"model": nn.Linear(1, 1).requires_grad_(False)},
        "model has nothing to train, since all of its parameters are frozen",
    ),
    *(
        ({"layout": md.Layout(zero=zero), "model": meta()}, ValueError, "0.weight on the meta device")
        for zero in range(3)
    ),
    *(
        (
            {"layout": md.Layout(zero=zero, precision=precision), "optimizer": lambda _: 3},
            TypeError,
            "made a int",
        )
        for zero in (0, 1)
        for precision in ("fp32", "bf16")
    ),
    (
        {"layout": md.Layout(zero=3), "optimizer": lambda parameters: 3},
        TypeError,
        "optimizer_class made a int; give a function from parameters to a torch.optim.Optimizer",
    ),
)


BF16 = {"precision": "bf16", "recompute": True}


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ({**BF16, "zero": 3}, {"data_parallel": {"bucket_mb": 1}}),
        ({**BF16, "zero": 3}, {"optimizer": torch.optim.LBFGS}),
        ({**BF16, "zero": 3}, {"fully_shard": {"units": 3}}),
        ({**BF16, "zero": 3}, {"fully_shard": {"offload": "/nonexistent/directory"}}),
        ({**BF16, "zero": 2}, {"data_parallel": {"compression": "float16"}}),
        ({**BF16, "zero": 1}, {"optimizer": torch.optim.LBFGS}),
        ({**BF16, "zero": 1}, {"optimizer": lambda parameters: None}),
        (BF16, {"data_parallel": {"bucket_mb": -1}}),
        (BF16, {"data_parallel": {"compression": "zip"}}),
        (BF16, {"optimizer": lambda parameters: None}),
        (BF16, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=-1)}),
        (BF16, {"optimizer": lambda _: SGD(nn.Linear(1, 1).parameters())}),
        (BF16, {"loss": 3}),
        ({}, {"optimizer": lambda parameters: None}),
    ],
)
def test_a_failed_prepare_leaves_the_model_as_it_was(
    cluster_of: Clusters, layout: dict[str, Any], arguments: dict[str, Any]
) -> None:
    def check() -> None:
        model, reference = net(), net()
        if md.size() > 1:
            for parameter in model.parameters():
                parameter.data.fill_(0.1)
        reference.load_state_dict(model.state_dict())
        options = {"optimizer": SGD, **arguments}
        with pytest.raises((ValueError, TypeError, OSError)) as caught:
            md.prepare(model, layout=md.Layout(dp=md.size(), **layout), **options)
        torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)
        assert not any("forward" in vars(part) for part in model.modules())
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        # Its error, which somebody may look at for long, keeps no part of it in the next one's way.
        engines = [md.prepare(each, SGD, md.Layout(dp=md.size())) for each in (model, reference)]
        assert engines[0].step(*BATCH) == engines[1].step(*BATCH)
        assert engines[0].step(*BATCH) == engines[1].step(*BATCH)
        assert caught.value is not None

    check()
    cluster_of(2).run(check)
