"""FP8: torch's bits, the scales of each recipe, and the weights of one process in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.checkpoint import load, save
from minidist.model import GPT, GPTConfig
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES, Fp8Recipe
from minidist.parallel.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from minidist.parallel.training import fp8
from minidist.plain import gpt, low_precision
from minidist.scale.memory.estimates import estimate
from minidist.scale.step_time import predict_step
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.plain_rungs import ADAMW, EXACT, draw_batches, module_of, small

CASTS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
ROWS = dict(zip(low_precision.ROWS, FP8_RECIPES, strict=True))  # the rung's names of the recipes

# Rounding.


def check_bits(module: Any) -> None:
    """All numbers that have 16 bits: also zeros of both signs, subnormals, infinities and NaNs."""
    numbers = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    for name, dtype in CASTS.items():
        expected = numbers.to(dtype).float()
        for x in (numbers.float(), numbers.double()):
            found = module.rounded(x, getattr(module, name)).float()
            if torch.tensor(1e3).to(dtype).isnan():  # torch before 2.13, for e4m3
                found[x.abs() > 464] = torch.nan
            assert torch.equal(found.isnan(), expected.isnan())
            bits = [y.nan_to_num(1.0, torch.inf, -torch.inf).view(torch.int32) for y in (found, expected)]
            assert torch.equal(*bits)


@pytest.mark.parametrize("module", [fp8, low_precision], ids=["engine", "rung"])
def test_rounding_gives_the_bits_of_torchs_casts(module: ModuleType) -> None:
    check_bits(module)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.round(x / step)", "torch.floor(x / step + 0.5)"),  # ties upwards
        (".clamp(min=least)", ""),
        ("y.sign() * beyond", "y.sign() * most"),
    ],
)
def test_a_wrong_rounding_is_seen(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_bits(module_of("low_precision", old, new))


# Scales.


def by_the_definition(x: Tensor, name: str, recipe: Fp8Recipe, rows: int) -> Tensor:
    """Each block by itself, by torch's casts."""
    height, width = (rows, recipe.block) if recipe.block else x.shape
    most, power = {"E4M3": (448.0, 8), "E5M2": (57344.0, 15)}[name]
    found = torch.empty_like(x)
    for i in range(0, len(x), height):
        for j in range(0, x.shape[1], width):
            block = x[i : i + height, j : j + width]
            scale = most / block.abs().max()
            if recipe.powers:
                scale = torch.exp2(power - block.abs().max().log2().floor())
            low = (block * scale).clamp(-most, most).to(CASTS[name])
            found[i : i + height, j : j + width] = low.float() / scale
    return found


@pytest.mark.parametrize("recipe", FP8_RECIPES.values(), ids=FP8_RECIPES)
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (128, 128), (7, 31)])
def test_every_block_has_its_scale(recipe: Fp8Recipe, shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape))
    for name, rows in (("E4M3", 1), ("E4M3", recipe.weight_rows), ("E5M2", 1)):
        expected = by_the_definition(x, name, recipe, rows)
        torch.testing.assert_close(fp8.scaled(x, getattr(fp8, name), recipe, rows), expected, rtol=0, atol=0)


@pytest.mark.parametrize("row", ROWS)
def test_the_engine_trains_like_the_rung(row: str) -> None:
    """Two programs by different hands; and rounding is not nothing."""
    batches, model, other = draw_batches(), small(), small()
    losses = low_precision.train(model, batches, ADAMW, recipe=row)
    engine = md.prepare(other, ADAMW, md.Layout(precision=ROWS[row]), loss=gpt.loss_of)
    torch.testing.assert_close([engine.step(*batch) for batch in batches], losses, **EXACT)
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()), **EXACT)
    exact = md.prepare(small(), ADAMW, loss=gpt.loss_of)
    assert 1e-5 < abs([exact.step(*batch) for batch in batches][-1] - losses[-1]) < 0.1


# Layouts.

WIDE = GPTConfig(vocabulary=64, context=8, layers=2, heads=2, width=64)
"""Shards of two ranks are multiples of 32 features, MX's blocks."""
WIDER = GPTConfig(vocabulary=256, context=8, layers=1, heads=2, width=256)


tokens = partial(models.tokens, vocabulary=64)


def model_of(shape: GPTConfig, seed: int) -> GPT:
    return GPT(shape, seed=seed, dtype=torch.float64)


def with_projections_of_zero(seed: int) -> GPT:
    """Gradients for the layers before them are 0 in the first step, and so are those layers' histories."""
    model = model_of(WIDE, seed)
    for name, p in model.named_parameters():
        if name.endswith(("attention.output.weight", "down.weight")):
            p.data.zero_()
    return model


TRAIN = contract.train_on_this_rank
CASES = {shape: contract.Case(partial(model_of, shape), tokens, batches=(8, 8, 8)) for shape in (WIDE, WIDER)}
FROM_ZERO = replace(CASES[WIDE], model=with_projections_of_zero)
DELAYED = "fp8_delayed"
LAYOUTS = [
    ("fp8", "dp=2,zero=1"),
    ("fp8", "dp=2,zero=2,recompute=True"),
    ("fp8", "dp=2,zero=3"),
    ("fp8", "tp=2,micro_batches=2"),
    ("fp8", "tp=2,micro_batches=2,sequence_parallel=True,recompute=attention alone"),
    ("fp8", "pp=2,micro_batches=2,schedule=zero_bubble"),
    ("fp8", "dp=2,tp=2,zero=3"),
    (DELAYED, "dp=2,zero=3,recompute=True"),
    (DELAYED, "pp=2,micro_batches=2,recompute=True"),
    (DELAYED, "tp=2,micro_batches=2,sequence_parallel=True"),
    ("fp8_blocks", "dp=2,zero=2"),
    ("fp8_blocks", "tp=2,micro_batches=2"),
    ("fp8_mx", "dp=2,zero=3"),
    ("fp8_mx", "tp=2,micro_batches=2"),
]


@pytest.mark.parametrize(("precision", "layout"), LAYOUTS, ids=["-".join(each) for each in LAYOUTS])
def test_a_layout_trains_like_one_process(precision: str, layout: str, cluster_of: Clusters) -> None:
    """One process with as many micro-batches as there are parts of the rows, each of which has its scales."""
    case = CASES[WIDER if precision == "fp8_blocks" and "tp" in layout else WIDE]
    case = FROM_ZERO if precision == DELAYED else case
    chosen = md.Layout.parse(f"{layout},precision={precision}")
    [expected] = cluster_of(1).run(TRAIN, case, md.Layout(precision=precision, micro_batches=2))
    for found in cluster_of(chosen.ranks).run(TRAIN, case, chosen):
        contract.compare(found, expected)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_part_that_is_scaled_by_itself_is_seen(layer: type, cluster_of: Clusters) -> None:
    case, layout = CASES[WIDE], md.Layout(tp=2, precision="fp8")
    [expected] = cluster_of(1).run(TRAIN, case, md.Layout(precision="fp8"))
    fault = contract.patched(layer, "cut_operands", "")
    for found in cluster_of(2).run(contract.with_fault, fault, TRAIN, case, layout):
        with pytest.raises(AssertionError):
            contract.compare(found, expected)


# The history of delayed scaling.


def two_steps(folder: Path, layout: md.Layout, saves: bool = False) -> list[float]:
    """Two steps, from a checkpoint or followed by one."""
    case = CASES[WIDE]
    engine = md.prepare(case.model(md.rank()), case.optimizer, layout, loss=case.loss)
    if not saves:
        load(engine, folder)
    losses = [engine.step(contract.own_rows(engine, batch)) for batch in case.global_batches()[:2]]
    if saves:
        save(engine, folder)
    return losses


CONTINUED = [
    "dp=2,zero=1",
    "cp=2,recompute=True",
    "cp=2,cp_kind=ulysses,micro_batches=2",
    "dp=2,zero=3,micro_batches=2",
    "tp=2,recompute=every second layer",
    "pp=2,micro_batches=4,recompute=True",
]


@pytest.fixture(scope="module")
def saved(cluster_of: Clusters, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint, and the losses of the next two steps in one process, each with all rows at once."""
    folder, alone = tmp_path_factory.mktemp("saved"), md.Layout(precision=DELAYED)
    cluster_of(1).run(two_steps, folder, alone, True)
    [losses] = cluster_of(1).run(two_steps, folder, alone)
    return folder, losses


@pytest.mark.parametrize("layout", CONTINUED)
def test_every_layout_continues_a_saved_history(
    layout: str, saved: tuple[Path, list[float]], cluster_of: Clusters
) -> None:
    """With the scales of past steps, it does not matter how a batch is cut, or how often it is computed."""
    chosen = md.Layout.parse(f"{layout},precision={DELAYED}")
    for losses in cluster_of(chosen.ranks).run(two_steps, saved[0], chosen):
        torch.testing.assert_close(losses, saved[1], **EXACT)


def alone_at_the_end(self: fp8.Fp8) -> None:
    """A fault: ranks keep their own maxima."""
    self.past = torch.cat((self.now[None], self.past[:-1]))
    self.now = torch.zeros_like(self.now)


@pytest.mark.parametrize(
    ("name", "fault"), [("load_settings", lambda *_: None), ("end_step", alone_at_the_end)]
)
def test_a_history_that_is_lost_is_seen(
    name: str, fault: Any, saved: tuple[Path, list[float]], cluster_of: Clusters
) -> None:
    layout = md.Layout(dp=2, precision=DELAYED)
    plant = contract.patched(fp8.Fp8, name, fault)
    for losses in cluster_of(2).run(contract.with_fault, plant, two_steps, saved[0], layout):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(losses, saved[1], **EXACT)


def a_step(recompute: bool) -> list[Any]:
    case, layout = CASES[WIDE], md.Layout(precision=DELAYED, recompute=recompute)
    engine = md.prepare(case.model(0), case.optimizer, layout, loss=case.loss)
    inputs, targets = case.global_batches()[0]
    engine.step(inputs, targets)
    before = engine.settings()["precision"]["fp8"]
    engine.evaluate(inputs * 0, targets * 0)
    assert engine.settings()["precision"]["fp8"] == before
    return [before, bool(engine.precision.fp8.now.any())]


def test_a_step_moves_the_history_once() -> None:
    """Also if it computes twice; and evaluation not at all."""
    (once, left), (again, _) = a_step(False), a_step(True)
    assert (once, left) == (again, False)
    assert all(each[0] != each[1] and not any(each[1]) for each in once.values())


# Bytes, memory, and what is refused.


def sent(layout: md.Layout) -> int:
    case = CASES[WIDE]
    engine = md.prepare(case.model(0), case.optimizer, layout, loss=case.loss)
    batch = contract.own_rows(engine, case.global_batches()[0])
    engine.step(batch)
    with comm.ledger() as ledger:
        engine.step(batch)
    return ledger.bytes_sent


@pytest.mark.parametrize(
    ("layout", "precision", "numbers"),
    [("dp=2", DELAYED, 3), ("tp=2", "fp8_mx", 0), ("tp=2", "fp8", 4), ("tp=2", DELAYED, 3)],
)
def test_bytes_are_those_of_the_formula(
    layout: str, precision: str, numbers: int, cluster_of: Clusters
) -> None:
    """2 (n - 1) / n 8 bytes for each number, of 6 Linears in a block and the head."""
    chosen, plain = md.Layout.parse(f"{layout},precision={precision}"), md.Layout.parse(layout)
    more = [a - b for a, b in zip(*(cluster_of(2).run(sent, each) for each in (chosen, plain)), strict=True)]
    assert more == [8 * numbers * (6 * WIDE.layers + 1)] * 2


@pytest.mark.parametrize(
    "layout", ["dp=1", "tp=2", "tp=2,sequence_parallel=True", "dp=2,zero=3,recompute=True"]
)
def test_memory_is_that_of_float32(layout: str, cluster_of: Clusters) -> None:
    def held(layout: md.Layout) -> Any:
        engine = md.prepare(GPT(WIDE, seed=0), ADAMW, layout)
        engine.step(*(x[: 8 // layout.dp] for x in tokens(torch.Generator(), 8)))
        return engine.memory()

    chosen = md.Layout.parse(f"{layout},precision=fp8_blocks")
    expected = estimate(WIDE, chosen, batch=(8, 8))
    for found in cluster_of(chosen.ranks).run(held, chosen):
        assert (found.parameters, found.activations) == (expected.parameters, expected.activations)


def test_what_fp8_cannot_do_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a ReLU has no torch.nn.Linear for FP8"):
        fp8.linears_of(nn.ReLU())
    with pytest.raises(ValueError, match=r"numbers in float32 or float64, and 1 has torch.bfloat16"):
        fp8.linears_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 2).bfloat16()))
    with pytest.raises(ValueError, match=r"is emulated.* saves no time"):
        predict_step(WIDE, md.Layout(precision="fp8"), (8, 8), "h100")
    with pytest.raises(ValueError, match="fp8_mx"):
        md.Layout(precision="fp8mx")
