"""What suites put beside their times: efficiencies, timelines, fits, the lessons' costs."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import minidist as md
from minidist.benchmarks import bench_cpu_matmul, bench_lessons, bench_scaling
from minidist.benchmarks.harness import collective_timing, results
from minidist.benchmarks.harness import run_suites as run
from minidist.benchmarks.harness.training import pipelines
from minidist.benchmarks.harness.training.rounds import Facts, Timed
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.comm import cost
from minidist.comm.cost.links import Link, LinkProfile, SharedMemoryCost
from minidist.parallel import schedules
from minidist.parallel.contract.memory_report import Memory as Bytes
from tests.benchmarks.harness.test_turns import FakeBenchmark


def test_efficiency_is_the_ideal_time_over_the_measured_one():
    assert bench_scaling.efficiency("strong", 4, [0.5, 0.5, 0.5], [1.0, 1.0, 1.2]) == pytest.approx(0.5)
    assert bench_scaling.efficiency("weak", 4, [1.25], [1.0]) == pytest.approx(0.8)
    # By pairs: a machine that has become three times as slow scales as well as before.
    assert bench_scaling.efficiency("weak", 2, [1.0, 3.0], [1.0, 3.0]) == 1.0


def test_every_series_scales_from_one_rank(monkeypatch):
    for cores, most in ((1, 4), (2, 4), (16, 8), (192, 8)):
        monkeypatch.setattr(bench_scaling, "CORES", cores)
        assert bench_scaling.sizes("data parallel")[-1] == most
        assert bench_scaling.sizes("pipeline") == [1, 2, 4]
        jobs = bench_scaling.jobs("weak", full=True)
        assert jobs["one rank"].work.rows == 4
        assert jobs["tensor parallel 4"].work.rows == 16
        assert {job.work.rows for job in bench_scaling.jobs("strong", full=False).values()} == {8}
        assert all(md.Layout.parse(job.make.args[0]).ranks == job.ranks for job in jobs.values())


def test_what_scaling_enters(monkeypatch):
    monkeypatch.setattr(bench_scaling, "CORES", 2)
    facts = [Facts([5.5], 0.1, sent, 0.0, Bytes(1, 2, 3, 4, 5)) for sent in (10, 20)]
    measured = {"one rank": Timed(facts[:1], [1.0, 1.0]), "ZeRO-2 4": Timed(facts, [0.5, 0.5])}
    benchmark = FakeBenchmark()
    bench_scaling.enter(benchmark, measured, "strong", "ZeRO-2", 4)
    extra = benchmark.extra_info
    assert (extra["scaling"], extra["series"], extra["size"], extra["layout"]) == (
        "strong",
        "ZeRO-2",
        4,
        "dp=4,zero=2",
    )
    assert (extra["efficiency"], extra["ratio"], extra["bytes_per_step"]) == (0.5, 0.5, 20)
    assert extra["note"] == "4 ranks share 2 cores"
    one = FakeBenchmark()
    bench_scaling.enter(one, measured, "strong", "ZeRO-2", 1)
    assert (one.extra_info["efficiency"], one.extra_info["layout"]) == (1.0, "dp=1")
    assert "peer" not in one.extra_info


def test_a_timeline_has_what_each_rank_did(cluster_of):
    case = Work("byte-tiny", rows=4, micro_batches=2, cut_by_time=True)
    (step,) = zip(*cluster_of(2).run(pipelines.passes, case, "interleaved", 1), strict=True)
    schedule = schedules.by_name("interleaved", 2, 2, 2)
    placement = schedules.SCHEDULES["interleaved"].placement(2, 2)
    expected = schedules.simulate(schedule, pipelines.mean_times(step, placement))
    schedules.simulate(schedule, pipelines.times(step, placement))  # a time for each pass of each stage
    lines = [pipelines.timeline(each) for each in (expected.timeline, step)]
    simulated, measured = lines
    assert [[each[:3] for each in rank] for rank in simulated] == [
        [each[:3] for each in rank] for rank in measured
    ]
    for rank in measured:
        assert all(start <= end for *_, start, end in rank)
        assert all(one[4] <= other[3] for one, other in pairwise(rank))
    assert min(rank[0][3] for rank in measured) == 0
    json.dumps(results.rounded(lines))


def test_a_slow_pipeline_is_timed_in_three_steps_on_all_ranks(cluster_of):
    case = Work("byte-tiny", rows=4, micro_batches=2, cut_by_time=True)
    steps = cluster_of(2).run(pipelines.passes, case, "1f1b", 9, 0.0)
    assert [len(each) for each in steps] == [3, 3]


def test_a_fit_has_alpha_and_beta_for_each_algorithm():
    memory = SharedMemoryCost(meet=1e-6, put=1e-10, take=2e-10, combine=4e-10, call=5e-6)
    links = {"messages": Link(1e-5, 1e-9, 2e-5, 3e-9), "torch": Link(4e-5, 2e-9)}
    profile = LinkProfile("loopback", "", links, 1e-10, memory, 2)
    ring = collective_timing.fitted(profile, "ring", 2)
    assert (ring["alpha"], ring["beta"], ring["busy_beta"], ring["gamma"]) == (1e-5, 1e-9, 3e-9, 1e-10)
    torchs = collective_timing.fitted(profile, "torch", 2)
    assert (torchs["alpha"], torchs["beta"]) == (4e-5, 2e-9)
    assert "busy_alpha" not in torchs
    shared = collective_timing.fitted(profile, "shared_memory", 2)
    assert (shared["alpha"], shared["beta"]) == (1e-6, pytest.approx(5e-10))
    # The slope of the prediction, so that a line drawn from the fit is the line that was predicted.
    slope = (
        cost.predict("all_reduce", "shared_memory", 2e9, 2, profile)
        - cost.predict("all_reduce", "shared_memory", 1e9, 2, profile)
    ) / 1e9
    assert slope == pytest.approx(shared["beta"], rel=0.01)


def test_collectives_beside_torchs(cluster_of, monkeypatch):
    for variant in ("all-gather", "broadcast", "all-to-all"):
        ranks = cluster_of(2).run(collective_timing.time_against_torch, variant, 4096, 1)
        benchmark = FakeBenchmark()
        collective_timing.enter(benchmark, ranks, variant, 4096, variant, "gloo")
        extra = benchmark.extra_info
        assert extra["label"] == f"{variant}, 4 KiB, 2 ranks"
        sent = collective_timing.SENT[variant](2) * 4096
        assert extra["bus_gb_per_s"] == pytest.approx(sent / benchmark.stats.stats.data[0] / 1e9)


CHECKS = """
from checks.support.verdicts import Right, Score

@lesson.exercise("1.1", hints=())
def add(answer, draw):
    return _told(3)

@lesson.exercise("1.2", hints=())
def plain(answer, draw):
    return Right(3)

def _told(cost):
    return Right(1, (Score("Steps", cost, 2),))
"""


def test_exercises_whose_check_counts_are_found():
    assert bench_lessons.counted(CHECKS, ("add", "plain")) == ["add"]
    found = bench_lessons.exercises(Path(__file__).parents[2] / "lessons")
    assert ("08_ranks_that_talk", "ring_all_reduce") in found
    assert 30 < len(found) < 69


def test_a_solution_above_par_is_told(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "lessons"))
    from checks.support.verdicts import Score

    at_par = Score("Bytes sent", 8, 8, unit="bytes")
    extra = {}
    bench_lessons.enter(extra, "8.1 shift", (at_par, Score("Steps", 1, 2)))
    assert (extra["label"], extra["cost"], extra["par"], extra["unit"]) == (
        "8.1 shift: bytes sent",
        8,
        8,
        "bytes",
    )
    assert "note" not in extra
    assert len(extra["scores"]) == 2
    bench_lessons.enter(extra, "8.1 shift", (at_par, Score("Steps", 3, 2, "send parts")))  # planted
    assert (extra["label"], extra["cost"], extra["note"]) == ("8.1 shift: steps", 3, "above par: send parts")
    extra = {}
    bench_lessons.enter(extra, "4.3 transpose", (Score("Bank conflicts", 0, 0),))
    assert (extra["cost"], extra["par"]) == (0, 0)


def test_a_lesson_whose_packages_are_missing_is_left_out(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("lesson 03 needs numba-cuda: pip install 'minidist[cuda]'")

    monkeypatch.setattr(bench_lessons.importlib, "import_module", missing)
    with pytest.raises(pytest.skip.Exception, match="needs numba-cuda"):
        bench_lessons.test_solution(FakeBenchmark(), None, "03_cuda_from_python", "add")


def test_an_interrupted_check_ends_the_run(monkeypatch):
    class Interrupted(Exception):
        pass

    class Lesson:
        solution = staticmethod(lambda name: None)

        def judge(self, name, solution, seed):
            raise Interrupted

    modules = {
        "checks.a": SimpleNamespace(lesson=Lesson()),
        "checks.support.verdicts": SimpleNamespace(Interrupted=Interrupted),
    }
    monkeypatch.setattr(bench_lessons.importlib, "import_module", modules.__getitem__)
    with pytest.raises(KeyboardInterrupt):
        bench_lessons.test_solution(FakeBenchmark(), None, "01_a", "add")


class Peaks:
    """Stands in for a machine's peaks, all of them `rate`."""

    def __init__(self, rate):
        self.rate, self.bandwidth = rate, 1.0

    def roof(self, cores):
        return self

    def peak(self, dtype):
        return self.rate


@pytest.mark.parametrize(
    ("rates", "rate", "peak"),
    [
        ((10.0,), 9.0, 10.0),
        ((10.0, 20.0), 15.0, 20.0),
        ((10.0, 9.0, 20.0), 15.0, 20.0),
        ((10.0, 9.0, 11.0), 15.0, 15.0),
    ],
)
def test_a_product_above_the_peak_measures_the_peak_again(monkeypatch, rates, rate, peak):
    asked = []
    monkeypatch.setattr(
        bench_cpu_matmul, "machine_peaks", lambda again=0: asked.append(again) or Peaks(rates[again])
    )
    assert bench_cpu_matmul.peak_of("one", "float32", rate) == (peak, rate > rates[0])
    assert asked == list(range(len(rates)))


def test_the_headline_is_measured_first_and_a_suite_of_every_name_is_there():
    names = list(run.suites())
    assert names[0] == "headline"


def first_losses(name, case):
    """The first step's loss by torch's form of a schedule, None without the last stage, and by ours."""
    inputs, targets = case.batches()[0]
    torchs = pipelines.torch_pipeline(name, case)
    ours = md.Pipeline([*pipelines.stages(case, name).values()], name, case.micro_batches)
    return torchs.train(inputs, targets), ours.step(inputs, targets)


@pytest.mark.parametrize("name", [name for name, kind in schedules.SCHEDULES.items() if kind.torch_name])
def test_torchs_form_of_a_schedule_trains_the_same_stages(name, cluster_of):
    case = Work("byte-tiny", rows=4, micro_batches=4, cut_by_time=True)
    found = cluster_of(2).run(first_losses, name, case)
    (torchs,) = [each for each, _ in found if each is not None]
    assert [ours for _, ours in found] == pytest.approx([torchs] * 2, rel=1e-5)
