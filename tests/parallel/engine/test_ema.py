"""EMA: the average of one process in every layout, without a byte sent."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import minidist as md
from minidist import comm
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import gpt, tokens
from tests.helpers.on_ranks import on_ranks

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
LAYOUTS = [md.Layout(dp=2, zero=zero) for zero in range(4)] + [md.Layout(tp=2)]
LAYOUTS += [md.Layout(pp=2, micro_batches=2), md.Layout(dp=2, tp=2, zero=1)]
DECAY = 0.6


CASE = contract.Case(partial(gpt, layers=1), tokens, SGD, batches=(4, 5, 4))


@cache
def expected() -> tuple[contract.Trained, dict[str, Tensor]]:
    """One process, and torch's own average."""
    model = gpt(0, layers=1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    optimizer, batches = SGD(model.parameters()), CASE.global_batches()
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    loss = contract.of_outputs(CASE.loss)
    trained = contract.plain_steps(model, optimizer, batches, loss)
    losses = [*trained.losses, float(loss(average.module, batches[-1]).detach())]
    return contract.Trained(losses, average.module.state_dict()), trained.state


def prepared(layout: md.Layout) -> tuple[md.Engine, md.EMA]:
    engine = md.prepare(gpt(md.rank(), layers=1), SGD, layout)
    return engine, md.EMA(engine, DECAY)


def steps(engine: md.Engine, ema: md.EMA, batches: slice = slice(None)) -> list[float]:
    losses = []
    for batch in CASE.global_batches()[batches]:
        losses.append(engine.step(contract.own_rows(engine, batch)))
        with comm.ledger() as ledger:
            ema.update()
        assert ledger.bytes_sent == 0
    return losses


def averaged(layout: md.Layout) -> tuple[contract.Trained, dict[str, Tensor]]:
    engine, ema = prepared(layout)
    losses = steps(engine, ema)
    with ema.applied():
        losses.append(engine.evaluate(contract.own_rows(engine, CASE.global_batches()[-1])))
        state = engine.full_state_dict()
    return contract.Trained(losses, state), engine.full_state_dict()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_average_is_that_of_one_process(cluster_of: Clusters, layout: md.Layout) -> None:
    wanted, weights = expected()
    for found, after in cluster_of(layout.ranks).run(averaged, layout):
        contract.compare(found, wanted)
        contract.compare(contract.Trained([], after), contract.Trained([], weights))


def resumed(layout: md.Layout, folder: Path) -> contract.Trained:
    """Stopped after two steps, and continued by an engine of another seed."""
    engine, ema = prepared(layout)
    losses = steps(engine, ema, slice(2))
    md.save(engine, folder / "training")
    with ema.applied():
        md.save(engine, folder / "averages")
    engine = md.prepare(gpt(7, layers=1), SGD, layout)
    md.load(engine, folder / "averages")
    ema = md.EMA(engine, DECAY)
    md.load(engine, folder / "training")
    losses += steps(engine, ema, slice(2, None))
    with ema.applied():
        return contract.Trained(losses, engine.full_state_dict())


@pytest.mark.parametrize("zero", [1, 3])
def test_a_training_continues_with_its_average(cluster_of: Clusters, zero: int, tmp_path: Path) -> None:
    wanted, _ = expected()
    wanted = contract.Trained(wanted.losses[:-1], wanted.state)
    for found in cluster_of(2).run(resumed, md.Layout(dp=2, zero=zero), tmp_path):
        contract.compare(found, wanted)


def test_mistakes_are_refused() -> None:
    engine = md.prepare(nn.Linear(2, 2), SGD)
    with pytest.raises(TypeError, match=r"engine is a Linear; give what md\.prepare returned"):
        md.EMA(engine.model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decay is 1; give a number from 0 to below 1"):
        md.EMA(engine, 1)
    ema = md.EMA(engine)
    with ema.applied(), pytest.raises(RuntimeError, match="has the averaged weights now; update after"):
        ema.update()


@on_ranks(2, zero=[1, 2, 3])
def test_a_layer_that_is_thawed_in_half_precision_is_averaged_as_its_master(zero: int) -> None:
    model = gpt(0, layers=1).float()
    frozen = {name for name, _ in model.named_parameters() if "mlp" in name}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    engine = md.prepare(model, SGD, md.Layout(dp=2, zero=zero, precision="bf16"), rehearse=False)
    ema, average = md.EMA(engine, DECAY), engine.full_state_dict()
    for number, batch in enumerate(CASE.global_batches()):
        for name, parameter in engine.model.named_parameters():
            parameter.requires_grad_(number > 0 or name not in frozen)
        engine.step(contract.own_rows(engine, batch))
        ema.update()
        state = engine.full_state_dict()
        average = {name: each.lerp(state[name].to(each.dtype), 1 - DECAY) for name, each in average.items()}
    assert {each.dtype for each in ema.averages.values()} == {torch.float32}
    with ema.applied():  # the state, and so what was averaged here, may be rounded to 8 bits
        found = engine.full_state_dict()
    torch.testing.assert_close(found, average, rtol=2**-6, atol=2**-10, check_dtype=False)
