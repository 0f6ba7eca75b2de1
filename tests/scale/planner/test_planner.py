"""Plans: they agree with `estimate` on memory, with `prepare` on refusals, and with common sense."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import minidist as md
from minidist.cli import plan as cli_plan
from minidist.model import GPT, GPTConfig
from minidist.model.configs import CONFIGS
from minidist.parallel.contract.memory_report import size
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.parallel.pipeline.layer_chain import check_layers
from minidist.parallel.schedules import simulation
from minidist.parallel.tensor_parallel.heads import cut_between_heads
from minidist.parallel.tensor_parallel.plans import plan_for
from minidist.parallel.tensor_parallel.styles import check_ties, resolve
from minidist.scale.dryrun.one_rank import dryrun
from minidist.scale.memory import estimate, fits
from minidist.scale.memory.training_setup import check_divisible
from minidist.scale.planner import plan_report as report
from minidist.scale.planner import trial
from minidist.scale.planner.candidates import Refused, candidates
from minidist.scale.planner.ranking import MEANINGFUL, Plan, Ranked, family_of, plan, seconds
from minidist.scale.step_time import pipeline_time
from minidist.scale.step_time.hardware import HARDWARE
from tests.conftest import Clusters, Run

GB = 10**9
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SHARED = GPTConfig(context=64, layers=2, heads=4, width=64, experts=2)


@pytest.fixture(scope="module")
def large() -> Plan:
    """bert-large on 8 ranks of 16 GB."""
    return plan("bert-large", ranks=8, memory=16 * GB, batch=64)


@pytest.fixture(scope="module")
def xl() -> Plan:
    """gpt2-xl on the same."""
    return plan("gpt2-xl", ranks=8, memory=16 * GB, batch=8)


def test_memory_is_what_estimate_says(large: Plan, xl: Plan) -> None:
    for found in (large, xl):
        question = found.question
        for each in [*found.fitting, *found.too_large]:
            expected = estimate(question.name, each.layout, batch=question.batch)
            assert each.memory == expected
            assert (each.step is not None) == (expected.peak <= question.memory)
            assert each.layout.ranks == 8
        assert found.fitting
    assert xl.too_large


def test_plain_data_parallelism_is_the_first_answer_where_it_is_enough(large: Plan) -> None:
    assert large.answer is not None
    assert family_of(large.answer.layout) == "plain"
    assert report.answer(large).startswith("Plain data parallelism is enough: dp=8")
    fastest = min(map(seconds, large.fitting))
    assert seconds(large.answer) * (1 - MEANINGFUL) <= fastest
    times = [*map(seconds, large.fitting[1:])]
    assert times == sorted(times)
    said = " ".join(report.reasons(large))
    least = size(large.least("plain")[1].peak)  # type: ignore[index]
    assert f"Sharding (ZeRO) {'takes' if 'ZeRO) takes' in said else 'would save'}" in said
    assert (
        f"it earns its keep below {least} a rank, where plain data parallelism alone no longer fits" in said
    )


def test_a_model_of_a_billion_and_a_half_needs_sharding(xl: Plan) -> None:
    assert xl.answer is not None
    assert family_of(xl.answer.layout) == "sharded"
    assert xl.best("plain") is None
    assert xl.least("sharded")[0].zero == 3  # type: ignore[index]
    assert "Plain data parallelism does not fit" in report.reasons(xl)[1]
    # The table of `fits` agrees: half precision and recomputation are not enough, ZeRO is.
    found = fits(16 * GB, ["gpt2-xl"])
    assert [fit.rows > 0 for fit in found if fit.layout.ranks == 1] == [False] * 3
    assert [fit.rows > 0 for fit in found if fit.layout.zero] == [True] * 3
    assert any(
        line.startswith("1 layout of plain data parallelism: at the least") for line in report.unfit(xl)
    )


def test_experts_are_shared_where_they_do_not_fit_otherwise() -> None:
    found = plan("mixtral-8x7b", ranks=16, hardware="h100", batch=(16, 4096))
    assert found.answer is not None
    assert (family_of(found.answer.layout), found.answer.layout.ep) == ("experts", 8)
    assert report.answer(found).startswith("Share the experts: expert parallelism: dp=16,zero=3")
    assert {each.layout.ep for each in [*found.fitting, *found.too_large]} == {1, 2, 4, 8}
    assert found.least("experts")[1].peak < found.least("plain")[1].peak / 5  # type: ignore[index]


def test_as_many_ranks_trade_heads_as_there_are_heads_and_the_others_form_a_ring() -> None:
    """Attention between trades is fused, which a ring's is not, so on long rows the planner prefers it."""
    shape = GPTConfig(context=2048, layers=2, heads=4, width=64)
    found = plan(shape, ranks=8, hardware="h100", batch=(1, 2048))
    alone = [md.Layout(cp=8, precision="bf16", cp_kind=kind) for kind in ("ring", "4x2", "2x4")]
    times = {each.layout.cp_kind: seconds(each) for each in found.fitting if each.layout in alone}
    assert times.keys() == {"ring", "4x2"}
    assert times["4x2"] < times["ring"]
    assert not any("trade" in each.reason for each in found.refused)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the optimizer's state plain data parallelism would seem enough.
    from minidist.scale.planner.candidates import Question

    whole = Question.estimate

    def forgetful(self: Question, *given: Any) -> Any:
        return replace(whole(self, *given), optimizer=0, transient=0)

    monkeypatch.setattr(Question, "estimate", forgetful)
    found = plan("gpt2-xl", ranks=2, memory=16 * GB, batch=4)
    assert found.best("plain") is not None
    assert any(
        each.memory != estimate("gpt2-xl", each.layout, batch=found.question.batch) for each in found.fitting
    )


def test_candidates_are_ranked_as_far_as_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Proofs took two thirds of the time to plan gpt2-xl on 64 ranks, and simulations most of the rest.
    simulated: list[Any] = []
    passes_of = pipeline_time.passes_of
    monkeypatch.setattr(simulation, "check_rules", lambda schedule: pytest.fail("a schedule is checked"))
    monkeypatch.setattr(pipeline_time, "passes_of", lambda *form: simulated.append(form) or passes_of(*form))
    found = plan("gpt2-small", ranks=8, hardware="h100", batch=50)
    assert report.reasons(found)
    assert report.table(found)
    shown = len(simulated)
    times = [*map(seconds, found.fitting[1:])]
    assert times == sorted(times)
    assert 0 < shown < len(simulated) / 10
    assert all(each.bound <= seconds(each) <= 2 * each.bound for each in found.fitting)
    assert seconds(found.fastest) == min(map(seconds, found.fitting))
    # A bound that is too high would hide a faster layout.
    for each in found.fitting:
        vars(each)["bound"] *= 1.5
    high = Ranked(found.fitting)
    assert [*map(seconds, high)] != sorted(map(seconds, high))


def test_a_bert_is_planned_as_a_dry_run_takes_it(large: Plan) -> None:
    assert not any(each.layout.cp > 1 or each.layout.sequence_parallel for each in large.fitting)
    assert not any(each.layout.cp > 1 or each.layout.sequence_parallel for each in large.too_large)
    for fields in ("cp=8", "dp=4,tp=2,sequence_parallel=True"):
        with pytest.raises(ValueError, match="which divides the tokens, and this is a BERT") as error:
            dryrun("bert-large", md.Layout.parse(fields), 64)
        assert str(error.value) in [each.reason for each in large.refused]
    assert any(each.layout.cp > 1 for each in plan("gpt2-small", ranks=2, memory=16 * GB, batch=2).fitting)


def test_hosts_share_one_copy_of_the_state_or_a_second_one_of_the_parameters(large: Plan) -> None:
    assert not any(each.layout.shard or each.secondary for each in [*large.fitting, *large.too_large])
    machine = HARDWARE["v100-16gb"]
    links = {"messages": replace(machine.between.links["messages"], beta=1e-9)}
    slow = replace(machine, between=replace(machine.between, links=links))
    found = plan("gpt2-small", ranks=16, hardware=slow, batch=32, memory=3 * GB)
    everything = [*found.fitting, *found.too_large]
    shares = {(each.layout.tp, each.layout.shard) for each in everything if each.layout.shard}
    assert shares == {(1, 8), (2, 4), (4, 2)}
    assert {(each.layout.zero, each.layout.shard) for each in everything if each.secondary} == {(3, 0)}
    for each in everything:
        given = {"batch": found.question.batch, "secondary": each.secondary}
        assert each.memory == estimate("gpt2-small", each.layout, **given)
    assert found.answer is not None
    assert found.answer.layout.shard == 8
    (least, *_) = sorted((each for each in found.fitting if each.secondary), key=seconds)
    assert report.written(least).endswith(f' with fully_shard={{"secondary": {least.secondary}}}')
    (entry, *_) = [each for each in report.as_json(found)["fitting"] if each.get("secondary")]
    assert md.Layout.parse(entry["layout"]).zero == 3


def test_slow_links_make_tensor_parallelism_wait() -> None:
    machine = HARDWARE["t4"]
    found = plan("gpt2-small", ranks=2, hardware=machine, batch=16)
    assert found.answer is not None
    assert family_of(found.answer.layout) == "plain"
    tensor = found.best("tensor")
    assert tensor is not None
    assert seconds(tensor) > 1.05 * seconds(found.answer)
    assert "Tensor parallelism takes" in " ".join(report.reasons(found))


def test_one_rank_and_what_fits_nowhere() -> None:
    one = plan("gpt2-small", ranks=1, memory=16 * GB, batch=8)
    assert report.answer(one).startswith("One rank is enough: ")
    assert report.reasons(one) == []
    nowhere = plan("gpt3-175b", ranks=2, memory=16 * GB, batch=2)
    assert nowhere.answer is None
    assert "gpt3-175b does not fit on 2 ranks of 16.0 GB: the smallest layout" in report.answer(nowhere)
    assert plan("bert-tiny", ranks=3, memory=GB, batch=2).too_large == []  # two rows for three ranks: refused


@pytest.mark.parametrize("name", HARDWARE)
def test_a_plan_keeps_to_a_machines_memory_and_precisions(name: str) -> None:
    machine = HARDWARE[name]
    found = plan("gpt2-small", ranks=2, hardware=name, batch=8)
    sharing = 2 if machine.cores else 1
    assert found.fitting
    assert all(each.memory.peak <= machine.memory // sharing for each in found.fitting)
    assert {each.layout.precision for each in found.fitting} <= set(machine.peak)


def test_gpus_train_in_half_precision_and_processors_in_float32_unless_asked() -> None:
    for name, precision in (("cpu-xeon-8480", "fp32"), ("h100", "bf16"), ("v100-16gb", "fp16")):
        found = plan("byte-tiny", ranks=1, hardware=name, batch=2)
        assert {each.layout.precision for each in found.fitting} == {precision}
    asked = plan("byte-tiny", ranks=1, hardware="cpu-xeon-8480", batch=2, precision="bf16")
    assert {each.layout.precision for each in asked.fitting} == {"bf16"}


SHAPES = [each for each in CONFIGS.values() if isinstance(each, GPTConfig)]
SHAPES += [SHARED, replace(SHARED, heads=3, width=48), replace(SHARED, experts=0, vocabulary=7)]


@pytest.mark.parametrize("shape", dict.fromkeys(replace(each, layers=2) for each in SHAPES), ids=str)
def test_a_shape_says_what_the_model_itself_says_of_its_matrices_and_layers(shape: GPTConfig) -> None:
    # A plan imports no torch, so it asks the shape where `prepare` asks the model.
    model = GPT(shape, device="meta")
    parts, together = resolve(model, plan_for(model))
    check_ties(model, parts)
    layouts = [md.Layout(tp=tp) for tp in (2, 3, shape.heads, shape.heads + 1, 2 * shape.heads)]
    layouts += [
        md.Layout(pp=pp, schedule=name, chunks=SCHEDULES[name].least_chunks)
        for pp in (2, 3, 4, 5)
        for name in SCHEDULES
    ]
    refused = []
    for layout in layouts:
        for check in (
            lambda each: check_divisible(shape, each),
            lambda each: (
                check_layers(model, each)
                if each.pp > 1
                else cut_between_heads(model, parts, together, each.tp)
            ),
        ):
            try:
                check(layout)
                refused.append(False)
            except ValueError:
                refused.append(True)
    assert refused[::2] == refused[1::2]
    assert {*refused} == {False, True}


def forms(ranks: int) -> tuple[list[md.Layout], list[str]]:
    """Layouts of a model with experts that fit, one for all micro-batches, and the refused ones."""
    question = plan(SHARED, ranks=1, memory=GB, hardware="cpu-xeon-8480", batch=8).question
    taken, refused = {}, []
    for each in candidates(replace(question, ranks=ranks)):
        if isinstance(each, Refused):
            refused.append(each.fields)
        else:
            taken[str(replace(each.layout, micro_batches=1))] = each.layout
    return [*taken.values()], refused


def prepared(layouts: list[str], refused: list[str]) -> list[str]:
    """On each rank: which of the first layouts `prepare` refuses, and which of the second it takes."""
    wrong = []
    for texts, expected in ((layouts, True), (refused, False)):
        for text in texts:
            try:
                md.prepare(GPT(SHARED), ADAMW, md.Layout.parse(text))
                taken = True
            except ValueError:
                taken = False
            if taken != expected:
                wrong.append(text)
    return wrong


@pytest.mark.parametrize(("taken", "left"), [(40, 5), pytest.param(2, 2, marks=pytest.mark.deep)])
def test_prepare_takes_what_is_planned_and_refuses_what_is_not(
    cluster_of: Clusters, taken: int, left: int
) -> None:
    layouts, refused = forms(4)
    assert len(layouts) >= 9
    assert len(set(refused)) == len(refused)  # each told apart from the others
    found = cluster_of(4).run(prepared, [str(each) for each in layouts[::taken]], refused[::left])
    assert found == [[]] * 4


def test_a_trial_runs_what_was_predicted(cluster_of: Clusters) -> None:
    layouts = [md.Layout(dp=2), md.Layout(tp=2), md.Layout(pp=2, micro_batches=2)]
    shape = CONFIGS["byte-tiny"]
    found = cluster_of(2).run(trial.in_rank, shape, layouts, (4, 16), 2, "sgd")
    assert [list(each) for each in found] == [[str(layout) for layout in layouts]] * 2
    assert all(len(times) == 2 and min(times) > 0 for each in found for times in each.values())
    asked = plan("byte-tiny", ranks=2, memory=GB, hardware="cpu-xeon-8480", batch=4)
    names = [str(each.layout) for each in asked.fitting[:3]]
    as_predicted = {str(c.layout): c.step.seconds for c in asked.fitting[:3] if c.step}
    assert "3 of 3 within 30%" in trial.verdict(asked.fitting, as_predicted)
    assert "the answer was the fastest of them" in trial.verdict(asked.fitting[:1], as_predicted)
    off = {name: 2 * value for name, value in as_predicted.items()}
    assert "0 of 3 within 30% (the worst 0.50)" in trial.verdict(asked.fitting, off)
    assert set(names) == set(as_predicted)


# The command.


def test_the_command(run: Run) -> None:
    words = ("plan", "--model", "bert-base", "--memory", "16GB", "--ranks", "4", "--batch", "32")
    code, out, _ = run(*words)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(
        "Plain data parallelism is enough: dp=4 trains bert-base on 4 ranks of 16.0 GB"
    )
    assert "What does not fit:" in lines
    assert any("zero=2 with pp=2" in line for line in lines)
    found = json.loads(run(*words[:5], "--ranks", "2", "--batch", "32", "--json")[1])
    assert found["answer"] == "dp=2,precision=fp16"
    assert found["profile"] == "v100-16gb"
    assert found["sentence"].startswith("Plain data parallelism is enough: dp=2 trains bert-base on 2 ranks")
    assert [entry["seconds"] for entry in found["fitting"][1:]] == sorted(
        entry["seconds"] for entry in found["fitting"][1:]
    )
    assert {entry["family"] for entry in found["fitting"]} >= {"plain", "sharded", "tensor", "pipeline"}


def test_the_help_names_every_machine() -> None:
    profile = inspect.signature(cli_plan.plan, eval_str=True).parameters["profile"]
    (option,) = profile.annotation.__metadata__
    assert set(HARDWARE) <= set(option.help.split(", "))


def test_what_fits_nowhere_is_an_exit_code(run: Run) -> None:
    code, out, _ = run("plan", "--model", "gpt2-xl", "--memory", "1GB", "--ranks", "1", "--batch", "1")
    assert code == 1
    assert out.startswith("gpt2-xl does not fit on 1 rank of 1.00 GB: the smallest layout")


def test_a_module_is_refused_without_being_printed() -> None:
    with pytest.raises(
        TypeError, match=r"model is of type Sequential; give a GPTConfig, a BERTConfig, or a name"
    ) as raised:
        plan(torch.nn.Sequential(*map(torch.nn.Linear, [3] * 50, [3] * 50)), ranks=2)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 200
