"""Estimated memory against what ranks count, what fits in a budget, and the papers' figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from minidist.model import GPT, BERTConfig, GPTConfig, TransformerConfig, config, cross_entropy
from minidist.model.bert import BERT
from minidist.model.configs import CONFIGS
from minidist.model.sampler import Sampler
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.contract.recompute_policies import POLICIES, RecomputePolicy
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.recompute import recompute_by
from minidist.scale.memory import estimates, parameter_sizes, plot, saved_activations, state_bytes
from minidist.scale.memory.__main__ import main
from minidist.scale.memory.estimates import Estimate, estimate
from minidist.scale.memory.largest_batch import fits, heading, parse_bytes, standard_layouts, table
from minidist.scale.memory.training_setup import TrainingSetup
from tests.conftest import Clusters
from tests.helpers.dry_measured import experts_in_turns
from tests.helpers.refusals import refuses

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
TINY = GPTConfig(vocabulary=61, context=24, layers=3, heads=4, width=32)
SHAPES = [
    TINY,
    replace(TINY, layers=1, width=24, heads=2, tied=False),
    GPTConfig(context=32, layers=2, heads=3, width=48),
    replace(TINY, experts=4, expert_width=48, balance_rate=0.01),
    replace(TINY, layers=1, experts=3, experts_per_token=1, capacity=3.0),
]
EXPERTS = SHAPES[3]


# The papers' figures.


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, "120"), (1, "31.4"), (2, "16.6"), (3, "1.9")])
def test_the_zero_papers_table(stage: int, gigabytes: str) -> None:
    # 7.5 B parameters on 64 ranks, mixed precision, Adam: figure 1.
    found = estimate(7.5e9, md.Layout(dp=64, zero=stage, precision="bf16")).total / 1e9
    assert f"{found:.{len(gigabytes.partition('.')[2])}f}" == gigabytes


def test_weights_of_bert() -> None:
    assert estimate("bert-tiny").parameters == pytest.approx(17.5e6, rel=0.01)
    assert estimate("bert-base").parameters == pytest.approx(438e6, rel=0.01)
    assert config("bert-base-mlm").parameters() == 109_514_298  # as published with a masked-LM head alone


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_block_is_what_the_formula_of_korthikanti_says(precision: str) -> None:
    # 34 s b h without two masks of one byte is 32; the paper leaves out statistics and log-sums.
    shape = CONFIGS["gpt3-2.7b"]
    found = saved_activations.Saved(shape, 4, 2048, 2).block() / (4 * 2048 * shape.width)
    assert 32 <= found < 32.1
    math = (
        saved_activations.Saved(shape, 4, 2048, 2, attention="math").block()
        - saved_activations.Saved(shape, 4, 2048, 2).block()
    )
    assert math > 4 * shape.heads * 2048**2 * 4  # the softmax in float32 alone


# Parameters, layer by layer.


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_layers_have_all_parameters(name: str, tied: bool) -> None:
    shape = config(name)
    shape = replace(shape, tied=tied) if isinstance(shape, GPTConfig) else shape
    assert sum(map(sum, parameter_sizes.layers(shape))) == shape.parameters()


# Activations, against what autograd saves.


def saved_by(model: nn.Module, shape: TransformerConfig, rows: int, again: bool | str = False) -> int:
    """Peak of a forward and a backward pass."""
    recompute_by(model, again)
    tokens = torch.randint(0, shape.vocabulary, (rows, shape.context))
    with ActivationCounter(model, [tokens]) as counter:
        outputs = model(tokens)
        loss = cross_entropy(outputs, torch.zeros_like(tokens)) if shape.generates else outputs.sum()
        loss.backward()
    return counter.peak


BERT_SIZES: dict[str, Any] = {"vocabulary": 61, "context": 24, "layers": 3, "heads": 4, "width": 32}
MODELS = [
    *SHAPES,
    *(replace(shape, dropout=0.1) for shape in (TINY, SHAPES[3])),
    GPTConfig(vocabulary=3, context=128, layers=4, heads=8, width=32, dropout=0.1),  # fullest in a block
    *(BERTConfig(**BERT_SIZES, head=head) for head in ("pooler", "masked_lm")),
]
ADDED = {
    "mlp alone": RecomputePolicy(lambda _, parts: [name for name in parts if name.endswith(".mlp")], ""),
    "the first two": RecomputePolicy(lambda layers, _: layers[:2], ""),
}
"""Policies that no layout has: a function and a record each."""


@pytest.mark.parametrize("policy", [False, *POLICIES, *ADDED])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("shape", MODELS)
def test_every_byte_of_the_activations(
    shape: TransformerConfig, precision: str, policy: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy in ADDED:
        monkeypatch.setitem(POLICIES, policy, ADDED[policy])
    layout = md.Layout(recompute=policy)
    for rows in (1, 5):
        expected = estimate(shape, layout, precision, (rows, shape.context)).activations
        make: Any = GPT if isinstance(shape, GPTConfig) else BERT
        assert saved_by(make(shape, dtype=DTYPES[precision]), shape, rows, policy) == expected


@pytest.mark.parametrize("head", ["pooler", "masked_lm"])
def test_every_parameter_of_a_bert(head: str) -> None:
    shape = BERTConfig(**BERT_SIZES, head=head)
    model = BERT(shape)
    for layer, sizes in zip(model.layers, parameter_sizes.layers(shape), strict=True):
        shared = 61 * 32 if head == "masked_lm" and layer is model.layers[-1] else 0
        assert sum(p.numel() for p in layer.parameters()) - shared == sum(sizes)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters()


# All of it, against what engines count.


def trained(
    shape: GPTConfig,
    layout: md.Layout,
    rows: int = 5,
    secondary: int = 0,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
) -> Memory:
    """What this rank counts after two steps on a global batch of that many rows."""
    options = {"secondary": secondary} if secondary else None
    engine = md.prepare(GPT(shape), optimizer, layout, fully_shard=options)
    text = torch.randint(0, shape.vocabulary, (rows, shape.context + 1), generator=torch.Generator())
    own = Sampler(rows, rows, rank=engine.data_rank, ranks=engine.data_ranks).share(0)
    with experts_in_turns():
        for _ in range(2):
            engine.step(text[own, :-1].contiguous(), text[own, 1:].contiguous())
    return engine.memory()


def check(found: Memory, expected: Estimate, activations: float = 0.1) -> None:
    """Equal to 1% for each part of the states, and to 10% for the activations."""
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=0.01), part
    assert found.activations == pytest.approx(expected.activations, rel=activations)
    assert found.buffers == expected.buffers


FORMS = (("fp32", False), ("fp32", True), ("bf16", True))
"""Precision, and whether activations are recomputed."""


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (0, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_engines_count_what_was_estimated(cluster_of: Clusters, stage: int, ranks: int) -> None:
    shape = SHAPES[ranks % len(SHAPES)]
    layouts = [md.Layout(ranks, zero=stage, precision=p, recompute=again) for p, again in FORMS]
    for rank, found in enumerate(cluster_of(ranks).run(lambda: [trained(shape, each) for each in layouts])):
        for layout, each in zip(layouts, found, strict=True):
            check(each, estimate(shape, layout, batch=(5, shape.context), rank=rank))


@pytest.mark.parametrize(
    ("text", "rows", "close"),
    [
        ("dp=2,micro_batches=3", 9, 0.1),
        ("dp=2,zero=2,micro_batches=2", 9, 0.1),
        ("dp=2,tp=2,zero=1", 8, 0.01),
        ("tp=2,pp=2,micro_batches=3", 8, 0.01),
        ("tp=2,cp=2,sequence_parallel=true,zero=3", 8, 0.01),
        ("cp=2,pp=2,micro_batches=2,recompute=true", 8, 0.01),
        ("dp=2,pp=2,micro_batches=4,schedule=interleaved,chunks=2,zero=1", 8, 0.01),
        ("pp=4,micro_batches=8,schedule=gpipe", 8, 0.01),
        ("pp=4,micro_batches=4,schedule=gpipe,recompute=true", 8, 0.01),
        ("dp=2,tp=2,zero=3,recompute=every second layer", 8, 0.01),
        ("tp=2,cp=2,sequence_parallel=true,recompute=attention alone", 8, 0.01),
        ("tp=2,pp=2,micro_batches=4,schedule=gpipe,recompute=attention alone", 8, 0.01),
        ("dp=2,pp=2,micro_batches=4,schedule=interleaved,chunks=2,recompute=every second layer", 8, 0.01),
        ("dp=2,ep=2", 8, 0.01),
        ("dp=4,ep=2,zero=1,recompute=true,precision=bf16", 8, 0.01),
        ("dp=4,ep=2,zero=2,micro_batches=2", 8, 0.01),
        ("dp=4,ep=4,zero=3,precision=bf16", 8, 0.01),
        ("dp=2,cp=2,ep=4,zero=1", 8, 0.01),
        ("dp=2,ep=2,tp=2,zero=3,recompute=attention alone", 8, 0.01),
        ("dp=2,ep=2,tp=2,sequence_parallel=true", 8, 0.01),
        ("dp=2,ep=2,pp=2,micro_batches=2", 8, 0.01),
    ],
)
def test_bytes_of_every_rank_of_a_mesh(cluster_of: Clusters, text: str, rows: int, close: float) -> None:
    layout = md.Layout.parse(text)
    shape = EXPERTS if layout.ep > 1 else TINY
    for rank, found in enumerate(cluster_of(layout.ranks).run(trained, shape, layout, rows)):
        check(found, estimate(shape, layout, batch=(rows, shape.context), rank=rank), close)


@pytest.mark.parametrize(("name", "options"), [("momentum", {"momentum": 0.9}), ("sgd", {})])
def test_other_optimizers(cluster_of: Clusters, name: str, options: dict[str, float]) -> None:
    layout, optimizer = md.Layout(dp=2, zero=1), partial(torch.optim.SGD, lr=0.1, **options)
    expected = estimate(TINY, layout, batch=(4, 24), optimizer=name)
    for found in cluster_of(2).run(trained, TINY, layout, 4, 0, optimizer):
        check(found, expected)


@pytest.mark.parametrize(
    ("text", "close"),
    [
        ("dp=2", 0.01),
        ("dp=3,zero=2", 0.01),
        ("dp=2,zero=1,precision=bf16", 0.01),
        ("dp=2,zero=3", 0.06),  # the last rank has the vectors, and AdamW's state of them
        ("dp=2,tp=2,zero=1", 0.01),
        ("pp=2,micro_batches=2", 0.01),
        ("dp=2,ep=2,zero=1", 0.01),
    ],
)
def test_muon(cluster_of: Clusters, text: str, close: float) -> None:
    layout, optimizer = md.Layout.parse(text), partial(md.Muon, lr=0.1)
    shape = EXPERTS if layout.ep > 1 else TINY
    for rank, found in enumerate(cluster_of(layout.ranks).run(trained, shape, layout, 8, 0, optimizer)):
        expected = estimate(shape, layout, batch=(8, 24), optimizer="muon", rank=rank)
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=close), part


HYBRID = [
    ("dp=4,zero=1,shard=2,precision=bf16", 0),
    ("dp=4,zero=2,shard=1", 0),
    ("dp=2,cp=2,zero=2,shard=2,recompute=true", 0),
    ("dp=4,zero=3,shard=2,precision=bf16", 0),
    ("dp=4,zero=3,precision=bf16", 2),
]
"""Layouts whose ranks keep copies, and the ranks of secondary shares."""


def test_hybrid_sharding_and_secondary_shares(cluster_of: Clusters) -> None:
    layouts = [(md.Layout.parse(text), secondary) for text, secondary in HYBRID]
    everyones = cluster_of(4).run(lambda: [trained(TINY, layout, 8, more) for layout, more in layouts])
    for rank, found in enumerate(everyones):
        for (layout, secondary), each in zip(layouts, found, strict=True):
            held = partial(estimate, TINY, layout, batch=(8, TINY.context), rank=rank)
            check(each, held(secondary=secondary))
            # As much as plain sharding over so many ranks, and half of the parameters more.
            if secondary:
                assert held().parameters == pytest.approx(each.parameters / 3, rel=0.01)


def test_the_formulas_of_hybrid_sharding_and_secondary_shares() -> None:
    both = [md.Layout(dp=64, zero=stage, precision="bf16", shard=8) for stage in (1, 2, 3)]
    for layout in both:
        assert estimate(8e9, layout) == estimate(8e9, replace(layout, dp=8, shard=0))
    layout = md.Layout(dp=64, zero=3, precision="bf16")
    more = estimate(8e9, layout, secondary=8).total - estimate(8e9, layout).total
    assert more == 2 * 8e9 / 8
    assert heading(both[2]).endswith("ZeRO-3, shard 8")
    for wrong, secondary in ((layout, 3), (layout, 64), (layout, True), (md.Layout(dp=4, zero=2), 2)):
        with pytest.raises(ValueError, match="ranks that share the parameters"):
            estimate("gpt2-small", wrong, secondary=secondary)


FAULTS: dict[str, Callable[[state_bytes.States], state_bytes.States]] = {
    "no gradients": lambda found: replace(found, gradients=0),
    "whole optimizer": lambda found: replace(found, optimizer=2 * found.optimizer),
    "gradients of half the width": lambda found: replace(found, gradients=found.gradients // 2),
    "parameters of another layout": lambda found: replace(found, parameters=found.parameters // 2),
}


@pytest.fixture(scope="module")
def measured(cluster_of: Clusters) -> Memory:
    """Stage 1 on two ranks."""
    found: Memory = cluster_of(2).run(trained, TINY, md.Layout(dp=2, zero=1))[0]
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_states_is_caught(
    measured: Memory, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    whole = estimates.stage_states
    expected = partial(estimate, TINY, md.Layout(dp=2, zero=1), batch=(5, 24), rank=0)
    check(measured, expected())
    monkeypatch.setattr(estimates, "stage_states", lambda *given: [*map(FAULTS[fault], whole(*given))])
    with pytest.raises(AssertionError):
        check(measured, expected())


@pytest.mark.parametrize("part", ["loss", "head", "block", "embedding"])
def test_activations_left_out_are_caught(
    measured: Memory, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(estimates, "activations", estimates.activations.__wrapped__)  # which keeps nothing
    monkeypatch.setattr(saved_activations.Saved, part, lambda _: 0)
    expected = estimate(TINY, md.Layout(dp=2, zero=1), batch=(5, 24), rank=0).activations
    if part in ("block", "head"):  # the others save less than the tolerance of this comparison
        assert measured.activations != pytest.approx(expected, rel=0.1 if part == "block" else 0.01)
    assert saved_by(GPT(TINY), TINY, 5) != estimate(TINY, batch=(5, 24)).activations


def with_others(setup: TrainingSetup) -> tuple[TrainingSetup, ...]:
    return setup, setup


EXPERT_FAULTS = {
    "as many ranks share the experts": (TrainingSetup, "sets", property(with_others)),
    "a row for each token": (GPTConfig, "rows_of_mlps", lambda _, tokens: tokens),
}


def test_a_planted_fault_in_the_experts_is_caught(
    cluster_of: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = md.Layout(dp=4, ep=2, zero=1)
    found = cluster_of(4).run(trained, EXPERTS, layout, 8)[0]
    expected = partial(estimate, EXPERTS, layout, batch=(8, 24), rank=0)
    check(found, expected(), 0.01)
    monkeypatch.setattr(estimates, "activations", estimates.activations.__wrapped__)  # which keeps nothing
    for fault in EXPERT_FAULTS.values():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            wrong = expected()
        with pytest.raises(AssertionError):
            check(found, wrong, 0.01)


# Arguments.


def test_precision_is_the_layouts_unless_given() -> None:
    layout = md.Layout(dp=4, zero=2, precision="fp16")
    assert estimate(10**6, layout) == estimate(10**6, md.Layout(dp=4, zero=2), "bf16")
    assert estimate(10**6, layout, "fp32").total == 4 * 10**6 + 12 * 10**6 // 4


def test_no_rank_is_the_fullest() -> None:
    layout = md.Layout(dp=2, pp=3, micro_batches=4, precision="bf16")
    shape = config("byte-small", layers=6)
    each = [estimate(shape, layout, batch=(8, 128), rank=rank) for rank in range(6)]
    assert estimate(shape, layout, batch=(8, 128)) == max(each, key=lambda found: found.peak)
    # 1F1B: the first stage holds three micro-batches, the middle one two.
    assert each[0].activations / each[2].activations == pytest.approx(3 / 2, rel=0.01)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches", "longer"), [(2, 23, 9), (3, 40, 0), (4, 36, 33)])
def test_a_long_schedule_is_as_full_as_its_beginning(
    name: str, ranks: int, micro_batches: int, longer: int
) -> None:
    chunks = SCHEDULES[name].least_chunks

    def fullest(moments: Callable[..., list[list[estimates.Moment]]], *sizes: int) -> list[int]:
        """For each stage the most that is live, where a longer micro-batch counts 7 and others 5."""
        weights = [7] * chunks + [5] * chunks
        found = moments(name, ranks, *sizes, chunks)
        return [max(sum(map(mul, live, weights)) for live, _ in own) for own in found]

    whole = fullest(estimates._moments, micro_batches, longer)
    assert fullest(estimates.moments_of, micro_batches, longer) == whole
    assert fullest(estimates._moments, ranks - 1, 0) != whole  # too short, so that it never fills


def test_tensor_parallelism_divides_what_the_paper_says() -> None:
    shape = config("gpt3-2.7b")
    one, four = (
        saved_activations.Saved(shape, 1, 2048, 2, part=parameter_sizes.ModelPart(ranks)).block()
        / (2048 * 2560)
        for ranks in (1, 4)
    )
    # (10 + 24 / t) s b h of equation 2, without the masks of 2.
    assert one == pytest.approx(8 + 24, rel=0.01)
    assert four == pytest.approx(8 + 24 / 4, rel=0.01)


test_wrong_arguments = refuses(
    lambda given: estimate(given[0], **given[1]),
    (("gpt2-smal", {}), "unknown model 'gpt2-smal': did you mean 'gpt2-small'"),
    ((None, {}), TypeError, "config is None; give a GPTConfig"),
    ((-1, {}), "config is -1 parameters"),
    ((10, {"layout": md.Layout(tp=2)}), "for tp, pp and cp a model's shape"),
    ((TINY, {"layout": md.Layout(tp=5)}), "tp is 5 in the layout and heads are 4; give at most that"),
    ((TINY, {"layout": md.Layout(pp=6)}), "pp is 6 with chunks=1 in the layout, and 3 blocks and two ends"),
    (("gpt2-small", {"layout": md.Layout(pp=15)}), "pp is 15 with chunks=1 in the layout, and 12 blocks"),
    ((TINY, {"precision": "fp4"}), "unknown precision 'fp4'"),
    ((TINY, {"batch": (1, 25)}), "batch is 1 rows of 25 tokens; give rows, at least 0"),
    ((TINY, {"batch": -1}), "batch is -1 rows"),
    ((TINY, {"rank": 1}), "rank is 1; give 0 to 0, a rank of the layout"),
    ((TINY, {"optimizer": "adan"}), "unknown optimizer 'adan': did you mean 'adam'"),
    ((TINY, {"attention": "flash"}), "unknown attention 'flash'"),
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("layout", ["dp=2", 2, {"dp": 2}]),
        ("batch", ["8", [8, 128], (8,), (8, 16, 1), (8, 1.5), (1.5, 8), 1.5, True, (True, 8), None]),
        ("rank", ["0", 0.0, False, [0]]),
    ],
)
def test_arguments_of_the_wrong_type(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r}; give ")):
            estimate("bert-tiny", **{name: value})


# What fits.


def test_the_largest_batch_fits_and_one_row_more_does_not() -> None:
    budget = 16 * 10**9
    for fit in fits(budget, ["bert-base", "gpt2-large"]):
        for rows in {fit.rows, fit.rows + 1} - {0}:
            peak = estimate(fit.config, fit.layout, batch=(rows * fit.layout.dp, fit.tokens)).peak
            assert (peak <= budget) == (rows <= fit.rows)
        assert fit.memory.peak <= budget or not fit.rows
        assert fit.batch == fit.rows * fit.layout.dp


def test_what_fits_in_16_gb() -> None:
    found = {(fit.name, heading(fit.layout)): fit.rows for fit in fits(16 * 10**9)}
    assert found["bert-base", "fp32"] > found["bert-base-mlm", "fp32"] > 0
    assert found["gpt2-xl", "fp32"] == found["gpt2-xl", "bf16"] == found["gpt2-xl", "bf16\nrecompute"] == 0
    assert found["gpt2-xl", "8 ranks\nbf16\nrecompute\nZeRO-1"] > 0
    assert found["gpt3-175b", "8 ranks\nbf16\nrecompute\nZeRO-3"] == 0
    for shape in ("bert-large", "gpt2-medium"):
        rows = [found[shape, heading(layout)] for layout in standard_layouts()]
        assert rows == sorted(rows), "each measure makes room for more rows"


def test_shapes_and_layouts_of_ones_own() -> None:
    (fit,) = fits(10**9, [TINY], [md.Layout(dp=3, zero=1)], tokens=5000)
    assert (fit.name, fit.tokens, fit.batch) == ("3 layers of 32", 24, 3 * fit.rows)
    (none,) = fits(1000, [TINY], [md.Layout()])
    assert none.rows == none.batch == 0
    assert none.memory.peak > 1000


def test_bytes_are_read() -> None:
    texts = {"16GB": 16 * 10**9, "16 GiB": 2**34, " 1.5mb ": 1500000, "2048": 2048, "3e9": 3 * 10**9}
    assert {text: parse_bytes(text) for text in texts} == texts


@pytest.mark.parametrize("text", ["", "GB", "16XB", "-1GB", "0", "nan", "inf GB", "1 2GB", "16"])
def test_what_are_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="give bytes such as 16GB"):
        parse_bytes(text)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    assert main(["--models", "bert-tiny,gpt3-175b", "--ranks", "4", "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Rows that fit in 16.0 GB" in out
    assert "none of these" in out
    assert path.stat().st_size > 10_000
    for wrong in ("--budget much", "--models bert", "--models ,", "--tokens 0", "--ranks 0"):
        assert main(wrong.split()) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_million_ranks_take_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of a stage are alike, so `estimate` does not loop over them; looping would take minutes."""
    many, few = (estimate("bert-tiny", md.Layout(dp=ranks, zero=3)) for ranks in (10**12, 10**3))
    assert many.parameters < few.parameters
    assert main(["--ranks", "1000000000000", "--models", "bert-tiny"]) == 0


def test_a_budget_without_end_has_its_own_answer() -> None:
    small, large = (fits(budget, ["bert-tiny"], [md.Layout()])[0] for budget in (10**15, 10**30))
    assert large.memory.peak <= 10**30
    assert large.rows == pytest.approx(small.rows * 10**15, rel=1e-3), "it is where the search ended"
    cells = [*table([large], 10**30).columns[3].cells]
    assert cells == [f"{large.rows:.2e}"]


def test_a_model_is_one_line_also_if_it_is_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "bert-tiny"]) == 0
    once = capsys.readouterr().out
    assert main(["--models", "bert-tiny,bert-tiny"]) == 0
    assert capsys.readouterr().out == once
    for models, rows in ((["bert-tiny", "bert-tiny"], 1), (["bert-tiny", "bert-large"], 2)):
        drawn = table(fits(10**9, models, [md.Layout()]), 10**9)
        assert (drawn.row_count, len(drawn.columns)) == (rows, 5)


@pytest.mark.parametrize("name", ["", "folder/", "folder"])
def test_a_figure_goes_to_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    path = name and f"{tmp_path}/{name}"
    assert main(["--models", "bert-tiny", "--plot", path]) == 2
    assert f"error: plot to {path!r}, which is " in capsys.readouterr().err
    with pytest.raises(ValueError, match="give a file, such as memory"):
        plot({"a": Memory(1, 1, 1, 1, 1)}, path)
    assert not [*(tmp_path / "folder").iterdir()]


# The figure.


def test_bars_have_the_heights_of_the_parts() -> None:
    bars = {"stage 0": Memory(4, 3, 2, 1, 0), "stage 1": Memory(4, 0, 2, 0, 5)}
    axes = plot(bars)
    heights = sorted(patch.get_height() for patch in axes.patches)
    assert heights == [1, 2, 2, 3, 4, 4, 5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["stage 0", "stage 1"]
    assert axes.get_ylabel() == "B on each rank"
    beside = plot(bars, measured={"stage 1": Memory(4, 0, 2, 0, 5)})
    assert len(beside.patches) == 10


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="estimates are for nothing"):
        plot({})
    with pytest.raises(ValueError, match="measured for b"):
        plot({"a": Memory(1, 1, 1, 1, 1)}, measured={"b": Memory(1, 1, 1, 1, 1)})
    plot({"empty": Memory(0, 0, 0, 0, 0)})
