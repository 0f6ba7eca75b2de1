"""What to use: the first that fits by the memory model, and the bytes by the formulas."""

import pytest

from minidist.benchmarks.report import answer
from minidist.benchmarks.report.answer import GB, Question
from minidist.model.configs import config
from minidist.parallel.contract.layout import Layout
from minidist.scale.memory import estimate, fits


def test_a_model_of_one_and_a_half_billion_on_eight_gpus_of_16_gb_takes_zero_1():
    question = Question()
    found = {choice.name: choice for choice in answer.choices(question)}
    chosen = answer.best(tuple(found.values()))
    assert chosen is found["ZeRO-1"]
    assert not found["data parallel"].fits
    assert answer.code(chosen) == 'md.Layout(dp=8, zero=1, precision="bf16", recompute=True)'
    said = answer.sentence(question, tuple(found.values()))
    assert said.startswith(
        "Use ZeRO-1. Plain data parallelism does not fit: it needs 37.4 GB on each GPU, which has 16 GB."
    )
    assert answer.first_fit(question) == ("ZeRO-1", chosen.recomputed)


def test_its_numbers_are_the_memory_models():
    for choice in answer.choices(Question())[:4]:
        layout = choice.layout
        assert choice.memory == estimate("gpt2-xl", layout, batch=(8, 1024))
        assert choice.recomputed == fits(16 * GB, ["gpt2-xl"], [layout])[0].batch
        assert choice.fits == (choice.memory.peak <= 16 * GB)
        assert choice.kept <= choice.recomputed


def test_bytes_are_the_formulas():
    sent = {choice.name: choice.sent for choice in answer.choices(Question())}
    weights = 2 * config("gpt2-xl").parameters()
    assert sent["data parallel"] == sent["ZeRO-1"] == sent["ZeRO-2"] == 2 * 7 * weights // 8
    assert sent["ZeRO-3"] == 3 * 7 * weights // 8
    assert sent["pipeline"] == 2 * 64 * 1024 * 1600 * 2
    assert sent["tensor parallel"] > 8 * sent["ZeRO-3"]


def test_a_pipeline_waits_and_nothing_else_does():
    idle = {choice.name: choice.idle for choice in answer.choices(Question())}
    assert idle.pop("pipeline") == pytest.approx(7 / 39)
    assert set(idle.values()) == {0.0}


def test_plain_data_parallelism_is_the_first_answer_where_it_is_enough():
    question = Question("gpt2-small", 2, 16 * GB, "a small model")
    found = answer.choices(question)
    assert answer.best(found) is found[0]
    assert answer.sentence(question, found).startswith("Use plain data parallelism. It needs at least ")


def test_where_nothing_fits_it_says_so_and_what_comes_nearest():
    question = Question("gpt2-xl", 2, 4 * GB)
    found = answer.choices(question)
    assert answer.best(found) is None
    assert answer.first_fit(question) is None
    assert answer.sentence(question, found).startswith("None of these fits. Even ZeRO-3 needs ")
    assert answer.as_json(question)["answer"] is None


def test_one_gpu_has_nothing_to_share():
    (only,) = answer.choices(Question("gpt2-small", 1, 16 * GB))
    assert (only.layout, only.sent, only.idle) == (Layout(precision="bf16", recompute=True), 0, 0.0)
