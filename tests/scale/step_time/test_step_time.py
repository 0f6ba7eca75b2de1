"""Predicted times: operations against torch's count, each part of a step, and published trainings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import minidist as md
from minidist.comm.cost import predict
from minidist.comm.cost.links import Link, LinkProfile
from minidist.model import GPT, cross_entropy
from minidist.model.configs import CONFIGS, BERTConfig, GPTConfig
from minidist.parallel import schedules
from minidist.parallel.contract.residency import ROWS, Residency
from minidist.parallel.schedules.instructions import placement_of
from minidist.parallel.training.recompute import recompute
from minidist.scale.dryrun.one_rank import dryrun
from minidist.scale.memory.parameter_sizes import on_rank
from minidist.scale.memory.training_setup import TrainingSetup
from minidist.scale.step_time import measure_machine, pipeline_time
from minidist.scale.step_time.gradient_exchange import GradientTime
from minidist.scale.step_time.hardware import HARDWARE, Crowd, Hardware, Rates, hardware, smallest
from minidist.scale.step_time.layer_work import LayerWork, PassWork, model_flops
from minidist.scale.step_time.measure_machine import (
    CASES,
    Measured,
    load,
    nonnegative,
    save,
    solve,
    this_machine,
)
from minidist.scale.step_time.prediction import HIDDEN, PARTS, predict_step
from minidist.scale.step_time.step_stages import StepStages
from minidist.scale.step_time.traffic import Wires
from tests.helpers.refusals import refuses

SHAPE = GPTConfig(vocabulary=61, context=24, layers=3, heads=4, width=32)
UNTIED = GPTConfig(vocabulary=50, context=16, layers=1, heads=2, width=24, tied=False)
EXPERTS = replace(SHAPE, experts=4, expert_width=48)


# Operations.


def counted(shape: GPTConfig, rows: int, again: bool) -> int:
    """Operations of products, without attention's, that torch counts in a forward and a backward pass."""
    model = GPT(shape)
    if again:
        recompute(model)
    tokens = torch.randint(0, shape.vocabulary, (rows, shape.context))
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    found = counter.get_flop_counts()["Global"]
    return sum(count for name, count in found.items() if "attention" not in str(name))


def reckoned(shape: GPTConfig, rows: int, again: bool) -> float:
    passes = LayerWork(shape, rows, shape.context, shape.context).layers(range(shape.layers + 2))
    return (passes.forward + passes.backward + passes.again * again).products


@pytest.mark.parametrize("shape", [SHAPE, UNTIED, CONFIGS["byte-tiny"], EXPERTS])
@pytest.mark.parametrize("again", [False, True])
def test_every_operation_of_the_products(shape: GPTConfig, again: bool) -> None:
    for rows in (1, 3):
        assert counted(shape, rows, again) == reckoned(shape, rows, again)


def test_a_forgotten_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LayerWork._linear

    def halved(self: LayerWork, *args: Any, **options: Any) -> PassWork:
        forward = whole(self, *args, **options).forward
        return PassWork(forward, forward)  # only the gradient of the weight

    monkeypatch.setattr(LayerWork, "_linear", halved)
    assert counted(SHAPE, 2, False) != reckoned(SHAPE, 2, False)


def test_six_operations_a_parameter_and_token() -> None:
    # Kaplan et al. 2020, table 1: 6 N without embeddings; attention is what is beyond.
    shape = CONFIGS["gpt3-13b"]
    found = model_flops(shape, 1, 2048) / 2048 / (shape.layers * 12 * shape.width**2)
    assert 6 < found < 6.5


# Steps.

LAYOUTS = (
    md.Layout(dp=8, precision="fp16"),
    md.Layout(dp=4, zero=1, precision="fp16", cp=2),
    md.Layout(dp=8, zero=2, precision="fp16", micro_batches=2),
    md.Layout(dp=8, zero=3, precision="fp16", recompute=True),
    md.Layout(dp=2, tp=4, precision="fp16"),
    md.Layout(dp=2, tp=4, precision="fp16", sequence_parallel=True, recompute=True),
    md.Layout(dp=2, pp=4, precision="fp16", micro_batches=4),
    md.Layout(pp=4, tp=2, precision="fp16", micro_batches=8, schedule="zero_bubble"),
    md.Layout(dp=4, pp=2, precision="fp16", micro_batches=4, schedule="interleaved", chunks=2, zero=1),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["bert-base", "gpt2-small"])
def test_the_parts_add_up(name: str, layout: md.Layout) -> None:
    found = predict_step(name, layout, 32, "v100-16gb")
    shown = {part: value for part, value in found.parts.items() if not part.endswith(HIDDEN)}
    assert found.seconds == pytest.approx(sum(shown.values()))
    assert set(shown) == set(PARTS)
    assert all(value >= 0 for value in found.parts.values())
    assert found.assumptions
    assert 0 < found.used < 1
    assert (found.parts["bubble"] > 0) == (layout.pp > 1)
    assert (found.parts["tp"] + found.parts["tp hidden"] > 0) == (layout.tp > 1)
    assert (found.parts["dp"] > 0) == (layout.dp > 1)
    assert (found.parts["recompute"] > 0) == layout.recompute


def with_links(machine: Hardware, factor: float) -> Hardware:
    """The same machine with links that are `factor` times slower."""

    def slower(profile: LinkProfile) -> LinkProfile:
        links = {name: Link(factor * link.alpha, factor * link.beta) for name, link in profile.links.items()}
        return replace(profile, links=links)

    return replace(machine, inside=slower(machine.inside), between=slower(machine.between))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_faster_link_or_device_is_never_slower(layout: md.Layout) -> None:
    machine = HARDWARE["v100-16gb"]
    times = [
        predict_step("gpt2-small", layout, 32, with_links(machine, factor)).seconds
        for factor in (0.1, 1, 3, 30)
    ]
    assert times == sorted(times)
    assert machine.rates is not None
    for factor in (1.5, 4.0):
        slower = replace(machine, rates=machine.rates.scaled(factor))
        assert predict_step("gpt2-small", layout, 32, slower).seconds > times[1]


def test_a_bubble_is_that_of_the_formula() -> None:
    # Blocks alone count for so large a model: (p - 1) / (m + p - 1) of the pipeline's time.
    layout = md.Layout(pp=4, micro_batches=8, precision="bf16")
    parts = predict_step("gpt3-175b", layout, 8, "h100").parts
    share = parts["bubble"] / (parts["compute"] + parts["bubble"] + parts["pp"])
    assert share == pytest.approx(3 / 11, rel=0.1)


def test_ranks_that_trade_heads_send_an_nth_of_the_ring() -> None:
    batch, seconds = (8, 1024), {}
    for kind in ("ring", "2x4", "ulysses"):
        layout = md.Layout(cp=8, cp_kind=kind, precision="bf16")
        parts = predict_step("gpt2-xl", layout, batch, "h100").parts
        seconds[kind] = parts["cp"] + parts["cp hidden"]
    profile, queries = hardware("h100").inside, 2 * 8 * 128 * 1600  # bytes of a rank's queries in a block
    each = sum(predict("all_to_all", "direct", many * queries, 8, profile) for many in (3, 1))
    assert seconds["ulysses"] == pytest.approx(2 * 48 * each)  # and backward
    assert seconds["ulysses"] < seconds["2x4"] < seconds["ring"]


test_what_ranks_cannot_share_is_refused = refuses(
    lambda given: predict_step(given[0], md.Layout.parse(given[1]), (8, 24), "h100"),
    ((SHAPE, "cp=8,cp_kind=ulysses"), r"8 ranks trade tokens for heads .* and have 4 heads"),
    ((SHAPE, "dp=2,ep=2"), r"ep is 2 .* has no experts for ranks to share"),
    ((EXPERTS, "dp=3,ep=3"), r"ep is 3 .* has 4 experts in a block; give a divisor"),
)


def test_a_ring_pays_the_network_for_the_hops_between_hosts_alone() -> None:
    machine = HARDWARE["h100"]
    inside, network = (each.links["messages"].alpha for each in (machine.inside, machine.between))
    tiny = 1e-6  # bytes: what is left are the hops

    def of(layout: md.Layout, axis: str, operation: str = "reduce_scatter") -> float:
        return Wires(machine, TrainingSetup(layout, layout.dp)).collective(operation, tiny, axis)

    assert of(md.Layout(dp=8), "dp") == pytest.approx(7 * inside)
    assert of(md.Layout(dp=16), "dp", "all_gather") == pytest.approx(network + 14 * inside)
    assert of(md.Layout(dp=1024), "dp") == pytest.approx(127 * network + 896 * inside)
    assert of(md.Layout(dp=4, tp=8), "dp") == pytest.approx(3 * network)  # a rank of each host
    assert of(md.Layout(dp=8, tp=4), "dp") == pytest.approx(3 * network + 4 * inside)
    assert of(md.Layout(dp=16), "dp", "all_reduce") < 2 * of(md.Layout(dp=16), "dp") + 1e-9
    step = predict_step("gpt2-xl", md.Layout(dp=1024, zero=1, precision="bf16", recompute=True), 8192)
    assert step.seconds < 1.6  # and not 4.3, as if each of 1023 hops crossed the network


SENT: dict[str, Callable[[float, int], float]] = {
    "all_reduce": lambda size, ranks: 2 * (ranks - 1) / ranks * size,
    "reduce_scatter": lambda size, ranks: (ranks - 1) / ranks * size,
    "all_gather": lambda size, ranks: (ranks - 1) * size,
    "all_to_all": lambda size, ranks: (ranks - 1) / ranks * size,
}
"""Bytes that a rank sends in a collective, by the bytes of its tensor."""


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("tp=2", SHAPE),
        ("tp=2,sequence_parallel=true", SHAPE),
        ("tp=4,sequence_parallel=true", SHAPE),
        ("tp=4", EXPERTS),
        ("dp=2,ep=2,tp=2,sequence_parallel=true", EXPERTS),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tensor_parallel_layers_send_what_a_dry_run_counts(
    monkeypatch: pytest.MonkeyPatch, layout: str, shape: GPTConfig, precision: str
) -> None:
    chosen = replace(md.Layout.parse(layout), precision=precision)
    lines = [each for each in dryrun(shape, chosen, (2 * chosen.dp, 24)).lines if each.axis == "tp"]
    step = StepStages(shape, TrainingSetup(chosen, 2 * chosen.dp, 24), HARDWARE["h100"])

    def told(collective: Callable[[str, float], float]) -> tuple[float, float]:
        """Messages of a forward and a backward pass, without the operators' seconds."""
        monkeypatch.setattr(Wires, "collective", lambda self, name, size, axis: collective(name, size))
        return step._tensor_parallel(step.work(2), range(SHAPE.layers + 2), SHAPE.layers)

    for phase, calls, bytes_ in zip(
        ("forward", "backward"),
        told(lambda name, size: 1.0),
        told(lambda name, size: SENT[name](size, chosen.tp)),
        strict=True,
    ):
        assert calls == pytest.approx(sum(each.calls for each in lines if each.phase == phase), abs=0.1)
        assert bytes_ == pytest.approx(sum(each.bytes_sent for each in lines if each.phase == phase), abs=0.1)


SHARED = [
    ("dp=8,zero=1,shard=4", 0),
    ("dp=8,zero=2,shard=2,micro_batches=2", 0),
    ("dp=8,zero=3,shard=4,micro_batches=2", 0),
    ("dp=8,zero=3,micro_batches=2", 4),
    ("dp=8,zero=3,shard=4", 2),
    ("dp=8,zero=4,micro_batches=2", 0),
    ("dp=8,ep=2", 0),
    ("dp=8,ep=4,zero=1", 0),
    ("dp=4,cp=2,ep=4,zero=2,micro_batches=2", 0),
    ("dp=8,ep=8,zero=3,micro_batches=2", 0),
]
"""Hybrid sharding, a row that nobody has and experts, and the ranks of secondary shares."""


@pytest.mark.parametrize(("layout", "secondary"), SHARED)
def test_gradients_and_parameters_send_what_a_dry_run_counts(
    monkeypatch: pytest.MonkeyPatch, layout: str, secondary: int
) -> None:
    monkeypatch.setitem(ROWS, 4, Residency(parameters=False, gradients=True, state=False))
    chosen = md.Layout.parse(layout)
    options = {"secondary": secondary} if secondary else None
    shape = replace(EXPERTS, experts=8) if chosen.ep > 1 else SHAPE
    counted = dryrun(shape, chosen, (16, 24), fully_shard=options).by_axis["dp"]
    monkeypatch.setattr(Wires, "collective", lambda self, op, size, axis: SENT[op](size, self.sizes[axis]))
    step = StepStages(shape, TrainingSetup(chosen, 16, 24, secondary=secondary), HARDWARE["h100"])
    sets = zip(on_rank(shape, step.part()).sets, step.setup.sets, strict=True)
    times = ((GradientTime(own, Wires(step.hardware, setup)), setup) for own, setup in sets)
    sent = [time._sent(0.0, 0.0, setup.micro_batches)[0] for time, setup in times]
    assert sum(sent) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_send_what_a_dry_run_counts(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    chosen = md.Layout(dp=4, ep=4, micro_batches=2, precision="bf16", recompute=recompute)
    counted = dryrun(EXPERTS, chosen, (8, 24)).by_axis["ep"]
    monkeypatch.setattr(Wires, "collective", lambda self, op, size, axis: SENT[op](size, self.sizes[axis]))
    sent = predict_step(EXPERTS, chosen, (8, 24), "h100").parts["ep"]
    counts, rows = 2 * 3 * 8 * 3, 3 * (4 * 3 * 2 * 48 * 32 * 2 // 4)  # of 3 blocks; two micro-batches
    assert sent == counted == (counts + rows / 2) * (1 + recompute) + rows / 2


def test_between_hosts_hybrid_sharding_sends_the_shares_alone() -> None:
    free = replace(HARDWARE["h100"], overlaps=False, ranks_per_host=4)
    inside = replace(free.inside, links={"messages": Link(0.0, 0.0)}, gamma=0.0)
    between = replace(free.between, links={"messages": Link(0.0, 1e-8)}, gamma=0.0)
    slow = replace(free, inside=inside, between=between)

    def waits(text: str, secondary: int = 0) -> float:
        return predict_step("gpt2-small", md.Layout.parse(text), 12, slow, secondary=secondary).parts["dp"]

    size = 4 * CONFIGS["gpt2-small"].parameters()
    for zero in (1, 2, 3):  # three hosts
        assert waits(f"dp=12,zero={zero},shard=4") == pytest.approx(2 * 2 / 3 * size / 4 * 1e-8, rel=0.01)
    # A ring over the hosts goes through all four cards; stage 3 has three of them, and one less of the root.
    root = 4 * CONFIGS["gpt2-small"].vocabulary * 768
    assert waits("dp=12,zero=3") == pytest.approx(11 / 12 * (3 * size - root) / 4 * 1e-8, rel=0.02)
    assert waits("dp=12,zero=3", 4) == pytest.approx(11 / 12 * 2 * size / 4 * 1e-8, rel=0.02)


def test_gradients_of_several_chunks_are_sent_behind_the_schedule() -> None:
    one = md.Layout(dp=2, pp=2, micro_batches=4, precision="bf16")
    several = replace(one, schedule="interleaved", chunks=2)
    for zero in (0, 1):
        parts = predict_step("gpt2-xl", replace(several, zero=zero), 16).parts
        assert parts["dp hidden"] == 0
        assert parts["dp"] > 0
    assert predict_step("gpt2-xl", one, 16).parts["dp hidden"] > 0


PUBLISHED = (
    # Narayanan et al. 2021, table 1: layers, width, heads, tp, pp, GPUs, rows, TFLOP/s of each.
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case[5]} GPUs")
def test_megatron_on_a100s_within_30_percent(case: tuple[int, ...]) -> None:
    layers, width, heads, tp, pp, gpus, rows, measured = case
    shape = GPTConfig(vocabulary=51200, context=2048, layers=layers, heads=heads, width=width)
    dp = gpus // tp // pp
    layout = md.Layout(dp, tp, pp, micro_batches=max(1, rows // dp // 4), precision="fp16", recompute=True)
    seconds = predict_step(shape, layout, rows, "a100").seconds
    # The paper's count of operations, equation 3, which includes recomputation.
    operations = 96 * rows * 2048 * layers * width**2 * (1 + 2048 / 6 / width + 51200 / 16 / layers / width)
    assert operations / seconds / gpus / 1e12 == pytest.approx(measured, rel=0.3)


def test_llama_3_on_h100s_within_30_percent() -> None:
    # Grattafiori et al. 2024, table 4: 430 TFLOP/s on 8192 GPUs. A GPT of that width and depth has as many
    # parameters, 406 billion.
    shape = GPTConfig(vocabulary=128256, context=8192, layers=126, heads=128, width=16384, tied=False)
    layout = md.Layout(
        dp=64,
        tp=8,
        pp=16,
        sequence_parallel=True,
        zero=1,
        precision="bf16",
        micro_batches=32,
        schedule="interleaved",
        chunks=2,
    )
    assert predict_step(shape, layout, 2048, "h100").flops_per_rank == pytest.approx(430e12, rel=0.3)


def test_trainings_on_tpus_within_30_percent() -> None:
    # Chowdhery et al. 2022: 46.2% of the peak on two times 3072 TPU v4, 12 ranks to a matrix, recomputed. A
    # GPT of that width and depth has 486 of its 540 billion parameters.
    pods = replace(HARDWARE["tpu-v4"], ranks_per_host=3072)
    palm = GPTConfig(vocabulary=256000, context=2048, layers=118, heads=48, width=18432)
    layout = md.Layout(dp=512, tp=12, zero=3, shard=256, precision="bf16", recompute=True)
    found = predict_step(palm, layout, 2048, pods)
    assert found.flops_per_rank == pytest.approx(0.462 * 275e12, rel=0.3)
    # MaxText, configs/v5e: 120 TFLOP/s with 16 billion parameters and six rows of 2048 tokens on each of 256
    # chips. Which width and depth they have is not said; these make 16.5 billion.
    shape = GPTConfig(vocabulary=32000, context=2048, layers=36, heads=48, width=6144)
    layout = md.Layout(dp=256, zero=3, precision="bf16", recompute=True)
    found = predict_step(shape, layout, 6 * 256, "tpu-v5e")
    assert found.flops_per_rank == pytest.approx(120e12, rel=0.3)
    assert "minidist does not run on tpu-v5e; to train there takes JAX or torch-xla" in found.assumptions


def test_a_v100_is_between_what_was_published_for_two_sets_of_kernels() -> None:
    shape = GPTConfig(vocabulary=51200, context=1024, layers=40, heads=16, width=1536)
    found = predict_step(shape, md.Layout(precision="fp16", recompute=True), 8, "v100-16gb").seconds
    assert 1.288 < found < 1.288 * 62.4 / 39  # 62.4 TFLOP/s took 1.288 s, and 39 so many times as long


test_bad_input_gets_a_sentence = refuses(
    lambda given: predict_step(*given),
    (("gpt2-smal", None, 8), "did you mean 'gpt2-small'"),
    (("gpt2-small", None, 8, "h10"), "did you mean 'h100'"),
    (("gpt2-small", md.Layout(precision="bf16"), 8, "t4"), "t4 has no rate for it; give fp16 or fp32"),
    (("gpt2-small", md.Layout(precision="fp16"), 8, "tpu-v4"), "tpu-v4 has no rate for it; give bf16"),
    (("gpt2-small", md.Layout(dp=8), 7), "7 rows for dp=8"),
    (("gpt2-small", md.Layout(dp=2), (8, 2000)), "2000 tokens a row; give 1 to 1024"),
    (("gpt2-small", md.Layout(cp=4), (8, 7)), "7 tokens a row for cp=4"),
    (("gpt2-small", md.Layout(tp=4, sequence_parallel=True), (8, 30)), "30 tokens a row, which tp=4"),
    (("byte-tiny", md.Layout(tp=8), 8), "tp is 8 in the layout and heads are 4"),
)


# Machines.


def test_every_machine_is_what_its_data_sheet_says_and_less() -> None:
    for name, machine in HARDWARE.items():
        assert machine.name == name == hardware(machine).name
        assert all((machine.source, machine.attained_source, machine.inside.source, machine.between.source))
        assert machine.rates is not None
        for precision, rate in machine.rates.flops.items():
            assert 0 < rate < machine.peak[precision]
        assert machine.rates.moved < machine.bandwidth
    assert smallest(16 * 10**9).name == "v100-16gb"
    assert smallest(17 * 10**9).name == "a100-40gb"
    assert smallest(80 * 10**9).name == "h100"
    assert smallest(10**12).name == "h200"  # no GPU has so much; TPUs and Trainium are asked for by name


def measured(rates: Rates, passes: float = 1.0) -> Measured:
    """What a rank with these rates would have measured."""
    found, updates = [], []
    for width, context, rows in CASES:
        shape = GPTConfig(context=context, layers=2, heads=4, width=width)
        work = LayerWork(shape, rows, context, context).layers(range(4))
        found.append(
            (
                passes * rates.seconds(work.forward, "fp32"),
                passes * rates.seconds(work.backward, "fp32", True),
            )
        )
        if (width, context, rows) in (CASES[0], CASES[-1]):
            count = 4 + 2 * 16 - 1
            updates.append(80 * shape.parameters() / rates.memory + count * rates.tensor)
    return Measured(found, sum(found[-1]), {"bf16": 0.5, "fp16": 20.0}, updates, 1e-4, None)


def test_rates_are_found_again() -> None:
    rates = Rates(
        {"fp32": 80e9, "bf16": 160e9, "fp16": 4e9}, 0.2, 5e9, 9e9, 20e-6, 8e-6, tensor=50e-6, step=1e-4
    )
    found = solve([measured(rates, 0.9), measured(rates, 1.1)])  # two ranks, of which the mean counts
    assert found.flops == pytest.approx(rates.flops, rel=0.02)
    for name in ("attention", "moved", "memory", "call", "backward_call", "tensor", "step"):
        assert getattr(found, name) == pytest.approx(getattr(rates, name), rel=0.1), name


def test_least_squares_without_negative_answers() -> None:
    assert nonnegative([[1, 0], [0, 1], [1, 1]], [2, 3, 5]) == pytest.approx([2, 3])
    assert nonnegative([[1, 1], [1, 2]], [2, 1]) == pytest.approx([1.5, 0])  # exactly: (3, -1)
    assert nonnegative([[1.0], [1.0]], [-1, -2]) == [0]


def crowded(ranks: int, cores: int) -> Hardware:
    """A measured machine of a few cores."""
    rates = Rates({"fp32": 80e9}, 0.2, 5e9, 9e9, 20e-6, 8e-6, tensor=50e-6)
    link = LinkProfile("loopback", "made up", {"messages": Link(1e-5, 1e-10)}, 1e-10)
    crowd = Crowd(ranks, rates.scaled(max(1, ranks / cores)), link, min(1.0, cores / ranks))
    return replace(
        HARDWARE["cpu-xeon-8480"], ranks_per_host=64, cores=cores, crowds={ranks: crowd}, overlaps=False
    )


def test_ranks_that_share_cores() -> None:
    machine = crowded(4, 2)
    assert machine.crowd(8).rates.flops["fp32"] == pytest.approx(machine.crowd(4).rates.flops["fp32"] / 2)
    assert machine.crowd(2).rates.flops["fp32"] == pytest.approx(machine.crowd(4).rates.flops["fp32"] * 2)
    crowd = machine.crowd(4)
    assert [crowd.pace(working, 2) for working in (1, 2, 3, 4)] == pytest.approx([0.5, 0.5, 0.75, 1])
    # Other ranks fill a pipeline's bubble, so it takes less time than with a device for each rank.
    layout = md.Layout(pp=4, micro_batches=4)
    apart = replace(machine, cores=None)
    shared = predict_step("byte-small", layout, 8, machine)
    assert shared.seconds < predict_step("byte-small", layout, 8, apart).seconds
    assert (
        shared.seconds
        >= predict_step("byte-small", md.Layout(pp=4, micro_batches=4), 8, crowded(4, 4)).seconds
    )


@pytest.mark.parametrize("name", sorted(schedules.SCHEDULES))
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (3, 5), (4, 9)])
def test_a_schedule_in_its_order_takes_what_its_simulation_takes(
    name: str, ranks: int, micro_batches: int
) -> None:
    chunks, drawn = schedules.SCHEDULES[name].least_chunks, random.Random(f"{name} {ranks}")
    seconds = {
        kind: [[drawn.random() for _ in range(micro_batches)] for _ in range(ranks * chunks)]
        for kind in ("forward", "backward", "backward_input", "backward_weight")
    }
    schedule = schedules.by_name(name, ranks, micro_batches, chunks)
    passes = pipeline_time.passes_of(name, ranks, micro_batches, chunks)
    for message in (0.0, 0.3):
        expected = schedules.simulate(schedule, {**seconds, "message": message}).seconds
        assert pipeline_time.seconds_of(passes, ranks, seconds, message) == expected
        # With a core each, shared cores are none.
        found = pipeline_time.seconds_on_shared_cores(passes, ranks, seconds, message, lambda _: 1.0)
        assert found == pytest.approx(expected)
    # On one core all passes run one after the other.
    one = pipeline_time.seconds_on_shared_cores(passes, ranks, seconds, 0.0, lambda working: working / ranks)
    ran = [(rank, each) for rank, own in enumerate(schedule) for each in own if each.computes]
    stages = placement_of(schedule).stages
    total = sum(seconds[each.kind][stages[rank][each.chunk]][each.micro_batch] for rank, each in ran)
    assert len(ran) >= ranks * micro_batches * chunks * 2
    assert one == pytest.approx(total / ranks)


def test_a_machine_is_kept_in_a_file(tmp_path: Any) -> None:
    file = tmp_path / "machine.json"
    machine = crowded(4, 2)
    save(machine, file)
    assert load(file) == machine == this_machine([4], file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="does not hold a machine's figures"):
        load(file)
    with pytest.raises(ValueError, match="give numbers of at least 1"):
        this_machine([0])


def test_a_half_precisions_peak_is_that_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = {"fp32": 40e9, "bf16": 10e9, "fp16": 1e9}
    crowd = crowded(4, 4).crowd(4)
    crowd = replace(crowd, rates=replace(crowd.rates, flops=flops))
    alone = Crowd(1, replace(crowd.rates, flops={name: 1.1 * rate for name, rate in flops.items()}), None)
    found = SimpleNamespace(peak=lambda dtype: 200e9, bandwidth=1e10)
    peaks = SimpleNamespace(all=found, machine="a machine", cores=4, date="today")
    monkeypatch.setattr("minidist.kernels.measure.roofline.measure", lambda: peaks)
    machine = measure_machine._machine({1: alone, 4: crowd})
    assert machine.peak == {"fp32": 200e9, "bf16": 40e9, "fp16": 4e9}
    step = predict_step("byte-small", md.Layout(dp=4, precision="bf16"), 8, machine)
    assert 0 < step.used < 1
    assert "100% of the peak" in step.assumptions[1]


def test_a_bert_has_its_own_ends() -> None:
    pooled, scores = (
        LayerWork(BERTConfig(layers=1, heads=2, width=64, head=head), 2, 128, 128).head.forward.products
        for head in ("pooler", "masked_lm")
    )
    assert pooled == 2 * 2 * 64**2
    assert scores == 2 * 2 * 128 * 64 * (64 + 30522)
    assert not math.isnan(predict_step("bert-tiny-mlm", md.Layout(tp=2), 4).seconds)
