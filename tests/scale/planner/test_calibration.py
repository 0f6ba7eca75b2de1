"""Predicted steps beside measured ones: what the suite of benchmarks enters, and whether they agree here."""

from __future__ import annotations

import pytest

from minidist.benchmarks import bench_predictions as suite
from minidist.parallel.contract.layout import Layout
from minidist.scale.planner.trial import NEAR
from minidist.scale.step_time import StepTime
from tests.benchmarks.harness.test_turns import FakeBenchmark


def test_layouts_are_of_their_numbers_of_ranks() -> None:
    for ranks, texts in suite.LAYOUTS.items():
        assert [Layout.parse(text).ranks for text in texts] == [ranks] * len(texts)


def test_each_turn_measures_the_machine_and_then_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(suite, "this_machine", lambda ranks: done.append(ranks))
    times = {str(Layout.parse(text)): i + 1.0 for i, text in enumerate(suite.LAYOUTS[2])}
    monkeypatch.setattr(suite, "trial", lambda model, *_, rounds: done.append((model, rounds)) or times)
    monkeypatch.setattr(suite, "predict_step", lambda *_: StepTime(2.0, {}, []))
    found = suite.measure(2, 7)
    assert done == [(2,), ("byte-small", 7), ("byte-tiny", 7)] * suite.TURNS
    assert [suite.ratio(turns) for turns in found.values()] == [each / 2 for each in times.values()] * 2


def test_what_is_entered() -> None:
    def turns(*took: float) -> list[tuple[float, StepTime]]:
        return [(each, StepTime(0.012, {"compute": 0.012, "dp": 0.0}, [])) for each in took]

    found = {("byte-tiny", "dp=2"): turns(0.012, 0.009, 0.015), ("byte-tiny", "tp=2"): turns(0.024)}
    for layout, ratio, said in (
        ("dp=2", 1.0, "within 30%; 0.67 of its launch's ratio; predicted in ms: compute 12.0"),
        ("tp=2", 2.0, "off by more than 30%; 1.33 of its launch's ratio; predicted in ms: compute 12.0"),
    ):
        benchmark = FakeBenchmark()
        suite.test_step(benchmark, lambda ranks: found, 2, layout, "byte-tiny")
        extra = benchmark.extra_info
        assert (extra["ratio"], extra["note"]) == (pytest.approx(ratio), said)
        assert (extra["label"], extra["peer"]) == (f"byte-tiny, {layout}", "the prediction")


@pytest.mark.scale
@pytest.mark.parametrize("model", suite.BATCHES)
@pytest.mark.parametrize("ranks", suite.LAYOUTS)
def test_steps_take_as_long_as_predicted(ranks: int, model: str) -> None:
    found = {key: 1 / suite.ratio(turns) for key, turns in suite.measure(ranks, 5, [model]).items()}
    assert {key: ratio for key, ratio in found.items() if abs(ratio - 1) > NEAR} == {}
