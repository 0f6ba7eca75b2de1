"""Models made on the meta device: each rank gets its part alone, with the values of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import GPT, config
from minidist.parallel.engine import meta_device
from minidist.parallel.engine.partition_model import RemoteLayer
from minidist.parallel.flat import joined_messages
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.activations import Live
from tests.helpers.models import Chain
from tests.parallel.test_layouts import CASE, SGD

PARSE = md.Layout.parse


SHAPE = config("byte-tiny", vocabulary=11, context=16, layers=2, heads=8, width=16)


def gpt(seed: int) -> GPT:
    """On a rank without memory."""
    return GPT(SHAPE, seed=seed, dtype=torch.float64, device="meta" if md.size() > 1 else None)


LAYOUTS = [
    "tp=2",
    "tp=3",
    "pp=2,micro_batches=2",
    "pp=2,schedule=interleaved,chunks=2",
    "dp=2,tp=2,zero=1",
    "tp=2,pp=2,sequence_parallel=true",
    "tp=2,cp=2,zero=3",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_without_memory_trains_as_any(cluster_of: Clusters, layout: str) -> None:
    rows = partial(CASE.rows, length=8) if "sequence" in layout else CASE.rows
    case = replace(CASE, model=gpt, rows=rows)
    contract.check(cluster_of, case, layout)


class Tied(Chain):
    """Of torch's own modules, which draw their values when they are made; the two ends tied; a statistic."""

    def __init__(self) -> None:
        ends = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
        super().__init__(ends[0], nn.BatchNorm1d(5), nn.Linear(5, 6), ends[1])
        ends[1].weight = ends[0].weight
        self.layers[1].register_buffer("count", torch.zeros(3), persistent=False)


TIED = {"layers.0": "row", "layers.3": "row"}


def chain(layout: str, options: dict[str, Any], fault: bool = False) -> tuple[dict[str, Tensor], bool, bool]:
    with torch.device("meta"):
        model = Tied()
    torch.manual_seed(7 + md.rank())  # rank 0's count
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(meta_device, "broadcast_together", lambda *_: None)
        engine = md.prepare(model, SGD, PARSE(layout), **options)
    real = not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    held = [not isinstance(layer, RemoteLayer) for layer in model.layers]
    first, last = model.layers[0], model.layers[3]
    tied = held[0] and held[3] and first.weight is last.weight
    return engine.full_state_dict(), real, tied


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("pp=2", {}),
        ("pp=3,dp=2,zero=1", {}),
        ("tp=2", {"plan": TIED}),
        ("tp=2,pp=2", {"plan": TIED}),
        ("pp=2,precision=bf16", {}),
    ],
)
def test_modules_draw_what_they_would_in_one_process(
    cluster_of: Clusters, layout: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(7)
    wanted = Tied()
    torch.manual_seed(7)
    for part in wanted.layers[:3]:
        if "bf16" in layout and part is not wanted.layers[1]:
            part.to(torch.bfloat16)  # torch before 2.13 draws other numbers in bfloat16
        part.reset_parameters()  # type: ignore[operator]
    for state, real, tied in cluster_of(PARSE(layout).ranks).run(chain, layout, options):
        assert real
        assert tied == ("pp" not in layout)  # on one stage they stay one
        for name, value in wanted.state_dict().items():
            dtype = torch.bfloat16 if "bf16" in layout and "layers.1" not in name else value.dtype
            shown = value.to(dtype) if value.is_floating_point() else value
            tolerance = 0.01 if dtype == torch.bfloat16 else 0
            torch.testing.assert_close(state[name], shown, rtol=tolerance, atol=tolerance, msg=name)


def test_values_that_are_not_sent_are_missed(cluster_of: Clusters) -> None:
    (state, *_), _ = cluster_of(2).run(chain, "pp=2", {}, True)
    torch.manual_seed(7)
    wanted = Tied().state_dict()
    assert not all(torch.equal(state[name], wanted[name]) for name in wanted)


WIDE = config("byte-tiny", vocabulary=64, context=8, layers=7, heads=4, width=32, tied=False)


@pytest.mark.parametrize("layout", ["pp=4", "tp=2,pp=2", "dp=2,tp=2,zero=1"])
def test_no_rank_has_more_than_its_part_and_a_module(cluster_of: Clusters, layout: str) -> None:
    def make() -> tuple[int, int, int]:
        model = GPT(WIDE, seed=md.rank(), device="meta")
        with Live() as live, pytest.MonkeyPatch.context() as patch:
            patch.setattr(joined_messages, "TOGETHER_BYTES", 1 << 12)  # tensors that are sent as one
            engine = md.prepare(model, SGD, PARSE(layout))
            torch.zeros(1)
        assert engine.model is model
        return live.most, live.now, sum(4 * p.numel() for p in model.parameters())

    whole = GPT(WIDE, device="meta")
    every = 4 * sum(p.numel() for p in whole.parameters())
    module = 4 * max(p.numel() for p in whole.parameters())
    results = cluster_of(PARSE(layout).ranks).run(make)
    for most, now, own in results:
        assert own <= now < own + module
        # The module, and the values of one parameter as they are drawn, in float64; or joined to be sent.
        assert most - now < 4 * module
        assert most < 0.75 * every
    copies = PARSE(layout).dp
    assert every <= sum(own for *_, own in results) // copies < 1.1 * every  # norms are on all tp ranks


def fours(part: nn.Module) -> None:
    for value in part.parameters(recurse=False):
        value.fill_(4)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_function_or_a_sentence_says_how_modules_begin(cluster_of: Clusters) -> None:
    def make(layout: str, **options: Any) -> tuple[str, list[float], bool]:
        with torch.device("meta"):
            model = nn.Module()
            model.layers = nn.ModuleList([nn.Linear(3, 3), Bare()])
        before = [*model.layers]
        try:
            engine = md.prepare(model, SGD, PARSE(layout), **options)
        except ValueError as error:
            # It is as it was, and can be prepared with what was missing.
            same = all(a is b for a, b in zip(before, model.layers, strict=True))
            as_before = same and all(p.is_meta for p in model.parameters())
            engine = md.prepare(model, SGD, PARSE(layout), initialize=fours)
            return str(error), engine.full_state_dict()["layers.1.weight"].tolist(), as_before
        return "", engine.full_state_dict()["layers.1.weight"].tolist(), True

    for layout in ("pp=2", "dp=2,zero=3"):
        for message, filled, as_before in cluster_of(2).run(make, layout):
            assert "layers.1, a Bare, has no reset_parameters; give initialize=" in message
            assert filled == [4, 4, 4]
            assert as_before
        for found in cluster_of(2).run(partial(make, layout, initialize=fours)):
            assert found == ("", [4, 4, 4], True)
