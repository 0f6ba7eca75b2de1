"""Benchmark a strategy of your own, in turns with minidist's data parallelism.

pytest -p minidist.benchmarks.conftest bench_own_strategy.py --benchmark-only
"""

from functools import partial

from torch.nn.utils import parameters_to_vector, vector_to_parameters

import minidist as md
from minidist.benchmarks.harness.training.programs import Program, engine
from minidist.benchmarks.harness.training.rounds import Job, measure_jobs, require_alike
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, Work, cross_entropy
from minidist.benchmarks.harness.turns import compared, record

WORK = Work("byte-tiny", rows=8)  # a model, and the rows of a global batch


def one_message(work: Work) -> Program:
    """The strategy: each rank takes its rows, and all gradients go in one message as bfloat16."""
    model = work.build()
    optimizer = ADAMW(model.parameters())

    def train(inputs, targets):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        message = md.comm.all_reduce(parameters_to_vector(gradients).bfloat16())
        vector_to_parameters(message.float() / md.size(), gradients)
        optimizer.step()
        return loss.item()

    return Program(train, share=(md.rank(), md.size()), module=model, optimizer=optimizer)


@compared("Data parallelism on 2 ranks")  # the times come from the ranks, round by round
def test_one_message(benchmark, worlds):
    jobs = {"ours": Job(2, WORK, one_message), "minidist": Job(2, WORK, partial(engine, "dp=2"))}
    measured = measure_jobs(worlds, jobs, rounds=5)
    require_alike(measured, "ours", "minidist", rtol=0.01)  # it trains as well, but for the rounding
    record(benchmark, measured["ours"].seconds, measured["minidist"].seconds, "minidist's dp=2")
    benchmark.extra_info |= measured["ours"].figures(WORK.rows) | measured["ours"].memory
