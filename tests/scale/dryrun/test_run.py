"""Dry runs: they equal what real ranks send and hold along every axis; planted mistakes show; bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import minidist as md
from minidist import comm
from minidist.model import GPTConfig
from minidist.parallel.compression.top_k import TopK
from minidist.parallel.engine.training_step import Engine
from minidist.scale.dryrun import calls, fake_tensors
from minidist.scale.dryrun.fake_tensors import DryTensors, NoData
from minidist.scale.dryrun.fake_world import Peers, dry_world, kinds
from minidist.scale.dryrun.one_rank import DryRun, dryrun, dryrun_kinds
from minidist.scale.dryrun.transformer import subject_of
from minidist.scale.memory.estimates import estimate
from minidist.scale.step_time.prediction import predict_step
from tests.conftest import Clusters, Run
from tests.helpers.dry_measured import Case, Measured, differences, measure, wrong
from tests.helpers.refusals import refuses

# Against real ranks: calls to the byte, memory within 5%.

SHORT = [
    Case("dp=2,zero=3,micro_batches=2", rows=5, way="shared_memory"),
    Case("pp=2,schedule=interleaved,chunks=2,micro_batches=4", clip_norm=None),
    Case("cp=2,recompute=true", tokens=13),
    Case("dp=2,tp=2,zero=1,sequence_parallel=true,precision=bf16"),
    Case("dp=2,pp=2,micro_batches=3", rows=7),
    Case("dp=2,zero=2,micro_batches=2,precision=fp16", optimizer="momentum"),
    Case("dp=4,zero=1,shard=2"),
    Case("dp=2,tp=2,zero=1", optimizer="muon"),
    Case("dp=2,tp=2,zero=3", optimizer="muon"),
    Case("dp=2,cp=2,zero=3,shard=2,micro_batches=2"),
    Case("cp=4,cp_kind=2x2", tokens=13),
    Case("tp=2,sequence_parallel=true,micro_batches=2,precision=fp8"),
    Case("dp=2,tp=2,zero=3,recompute=true,precision=fp8_delayed"),
    Case("dp=4,zero=3,micro_batches=2", secondary=2, way="shared_memory"),
    Case("dp=4,ep=2,zero=1,recompute=true", experts=4),
    Case("dp=4,ep=4,zero=3", experts=4, way="shared_memory"),
    Case("dp=2,ep=2,pp=2,micro_batches=2", experts=4),
    Case("dp=2,ep=2,tp=2,zero=2,micro_batches=2", experts=2),
]


def name_of(case: Case) -> str:
    return case.layout


@pytest.mark.parametrize("case", SHORT, ids=name_of)
def test_a_dry_run_sends_and_holds_what_ranks_do(cluster_of: Clusters, case: Case) -> None:
    last = case.parsed.ranks - 1
    assert not wrong(cluster_of(last + 1).run, case, (0, last))


# Planted mistakes.


@pytest.fixture(scope="module")
def real(cluster_of: Clusters) -> list[Measured]:
    """A dry run and its measurement, made once for all mistakes."""
    run: Any = cluster_of(2).run
    found: list[Measured] = run(measure, PLANTED)
    return found


PLANTED = Case("pp=2,micro_batches=2")


def test_a_collective_that_is_left_out_is_found(real: list[Measured], monkeypatch: Any) -> None:
    monkeypatch.setattr(Engine, "_on_all_stages", lambda self, value: value)
    for rank in range(2):
        found = differences(PLANTED.dry(rank), real[rank])
        assert [each[:50] for each in found] == [
            f"{step}: 1 times left out ('all_reduce', 'float64', ()"[:50] for step in ("first step", "step")
        ]


def test_a_collective_that_is_counted_twice_is_found(real: list[Measured], monkeypatch: Any) -> None:
    append = calls.Recorder.append

    def twice(self: calls.Recorder, call: Any) -> None:
        for _ in range(1 + (call.name == "send" and len(self) == 2)):
            append(self, call)

    monkeypatch.setattr(calls.Recorder, "append", twice)
    (found,) = differences(PLANTED.dry(1), real[1])
    assert found.startswith("step: 1 times too often ('send', 'float32', (4, 16, 32), (0, 1), 8192)")


def test_bytes_that_are_held_too_long_are_found(real: list[Measured], monkeypatch: Any) -> None:
    forward = nn.LayerNorm.forward
    # Of these two the first keeps its result, and the second that of the first.
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: forward(self, x).exp().cos())
    assert any(each.startswith("activations: ") for each in differences(PLANTED.dry(0), real[0]))


# What holds no data, and what does.


def test_tensors_take_no_memory_and_know_their_shapes() -> None:
    with DryTensors() as dry:
        x = dry.empty((2**20, 2**20)).requires_grad_()  # 4 TB
        y = functional.gelu(x).sum(dim=1)
        y.backward(torch.empty_like(y))
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert x.grad.untyped_storage().nbytes() == 2**42
        assert x.detach().view(-1).data_ptr() == x.data_ptr() != x.grad.data_ptr()
        assert float(x.detach().sum()) == 0.0  # a single number may be read; its value is unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_take_what_a_cpu_takes(dtype: torch.dtype) -> None:
    """As of transformers' experts; torch says their shape for bfloat16 alone."""
    shapes, ends = ((8, 16), (3, 16, 24)), torch.tensor([2, 5, 8], dtype=torch.int32)
    real = torch._grouped_mm(*(torch.ones(shape, dtype=dtype) for shape in shapes), offs=ends)
    with DryTensors() as dry:
        found = torch._grouped_mm(*(dry.empty(shape, dtype) for shape in shapes), offs=ends)
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("zero", [1, 3])
def test_a_first_step_costs_what_its_parameters_do(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twice as many layers, each in a bucket of its own, at most twice as many operations."""
    counted, dispatch = [0], DryTensors.__torch_dispatch__

    def count(self: DryTensors, *arguments: Any) -> Any:
        counted[0] += 1
        return dispatch(self, *arguments)

    monkeypatch.setattr(DryTensors, "__torch_dispatch__", count)
    for layers in (8, 16):
        shape = GPTConfig(context=16, layers=layers, heads=4, width=64)
        counted.append(-counted[0])
        buckets = {"bucket_mb": 0.05} if zero == 1 else None
        dryrun(shape, md.Layout(dp=2, zero=zero), (2, 16), data_parallel=buckets)
        counted[-1] += counted[0]
    assert counted[2] <= 2.05 * counted[1]


def test_numbers_beside_them_are_computed() -> None:
    with DryTensors() as dry:
        assert torch.tensor([1.0, 2.0]).mul_(3).tolist() == [3.0, 6.0]
        flat = torch.zeros(2**22)  # a bucket: gradients, and counts at its end
        flat[:-2].copy_(dry.empty((2**22 - 2,)))
        flat[-2:] = torch.tensor([1.0, 5.0])
        with dry_world(0, 8, dry, Peers(md.Layout(), 0)):
            comm.all_reduce(flat)
        assert flat[-4:].tolist() == [0.0, 0.0, 8.0, 40.0]


def test_a_value_that_no_dry_run_has_is_an_error() -> None:
    with DryTensors() as dry:
        x = dry.empty((3, 4))
        with pytest.raises(NoData, match="reads a value"):
            x[0, 0].item()
        with pytest.raises(NoData, match="depends on values"):
            x.nonzero()


def test_the_rest_of_a_world_is_like_its_one_rank() -> None:
    tensors = DryTensors()
    with tensors, dry_world(5, 1024, tensors, Peers(md.Layout(), 0)):
        assert (md.rank(), md.size()) == (5, 1024)
        with comm.ledger() as ledger:
            assert float(comm.all_reduce(torch.tensor(2.0))) == 2048.0
            assert float(comm.all_reduce(torch.tensor(2.0), "max")) == 2.0
            assert comm.all_gather(torch.tensor([5])).tolist() == [5] * 1024
            assert comm.broadcast(torch.tensor([7]), source=3).tolist() == [7]
            assert comm.reduce_scatter(torch.arange(2048.0)).tolist() == [10 * 1024, 11 * 1024]
            comm.all_reduce(tensors.empty((2**28,)))
        assert [call.bytes_sent for call in ledger.calls][-1] == 2 * 1023 * 2**30 // 1024
    assert md.size() == 1


def test_large_tensors_are_not_computed_with_whatever_they_hold(
    cluster_of: Clusters, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fake_tensors, "LARGE", 256)  # as those of a real model are
    assert not wrong(cluster_of(2).run, Case("dp=2,zero=2,micro_batches=2"), (1,))


# What is found.


@pytest.fixture(scope="module")
def thousand() -> DryRun:
    return dryrun("gpt2-xl", md.Layout(dp=64, tp=4, pp=4, zero=1), rank=1023)


def test_one_of_1024_ranks(thousand: DryRun) -> None:
    assert thousand.place == {"pp": 3, "dp": 63, "cp": 0, "tp": 3}
    assert thousand.bytes_sent == sum(thousand.by_axis.values()) == sum(thousand.by_phase.values())
    assert set(thousand.by_axis) == {"dp", "tp", "pp"}
    assert [*thousand.by_phase] == ["forward", "backward", "update"]
    held = estimate("gpt2-xl", thousand.layout, batch=64, rank=1023)
    for part in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(thousand.memory, part) == pytest.approx(getattr(held, part), rel=1e-3)


def test_what_each_axis_sends_in_each_phase(thousand: DryRun) -> None:
    found = {(line.axis, line.phase, line.name): line.calls for line in thousand.lines}
    assert found == {
        ("dp", "backward", "reduce_scatter"): found["dp", "update", "all_gather"],
        ("dp", "update", "all_gather"): found["dp", "backward", "reduce_scatter"],
        ("dp", "backward", "all_reduce"): 1,  # counts of use
        ("tp", "forward", "all_reduce"): 2 * 11,  # of blocks
        ("tp", "forward", "all_gather"): 1,  # of the loss
        ("tp", "backward", "all_reduce"): 2 * 11 + 1,
        ("pp", "forward", "recv"): 1,
        ("pp", "backward", "send"): 2,  # of activations, and of the tied matrix
        ("pp", "backward", "recv"): 1,
        ("pp", "update", "recv"): 1,
        ("pp", "update", "all_reduce"): 1,
    }


def test_axes_that_share_a_group_are_told_apart() -> None:
    found = Case("cp=2").dry(0)
    assert {(line.axis, line.name) for line in found.lines} == {
        *(("cp", "send"), ("cp", "recv"), ("cp", "all_gather"), ("dp", "all_reduce"))
    }


def test_hybrid_sharding_and_secondary_shares_are_of_the_data_parallel_axis() -> None:
    # Blocks of two neighbours over dp and cp are the rings of context parallelism, too.
    shared = Case("dp=2,cp=2,tp=2,zero=3,shard=2").dry(0)
    assert {(line.axis, line.ranks, line.name) for line in shared.lines if line.axis != "tp"} == {
        *(("cp", 2, "send"), ("cp", 2, "recv"), ("cp", 2, "all_gather")),
        *(("dp", 2, "all_gather"), ("dp", 2, "reduce_scatter"), ("dp", 2, "all_reduce")),
        *(("dp", 4, "all_reduce"), ("world", 8, "all_reduce")),
    }
    twice = dryrun("byte-tiny", md.Layout(dp=16, zero=3), fully_shard={"secondary": 8})
    assert set(twice.by_axis) == {"dp"}
    gathers = [(line.phase, line.ranks) for line in twice.lines if line.name == "all_gather"]
    assert gathers == [("forward", 16), ("backward", 8)]


def test_a_rings_messages_are_of_the_pass_that_sends_them() -> None:
    # Three micro-batches on a stage of two layers with attention: keys and values go round once forward;
    # backward they go round again, and then their gradients.
    found = dryrun("byte-small", md.Layout(cp=2, pp=2, micro_batches=3), (6, 128))
    sent = {line.phase: line.calls for line in found.lines if (line.axis, line.name) == ("cp", "send")}
    assert sent == {"forward": 6, "backward": 12}
    passed = {(line.phase, line.name): line.calls for line in found.lines if line.axis == "pp"}
    assert (passed["forward", "send"], passed["backward", "recv"]) == (3, 3 + 1)  # and the tied matrix


def test_kinds_are_all_ranks() -> None:
    divided, layout = subject_of("gpt2-xl").divided, md.Layout.parse("dp=64,tp=4,pp=4,zero=1")
    found = kinds(divided, layout, (64, 1024))
    assert sum(count for _, count in found) == 1024
    assert [rank for rank, _ in found] == [0, 3, 256, 259, 512, 515, 768, 771]  # 25 heads: the last has 7
    assert kinds(divided, md.Layout(), (1, 1024)) == [(0, 1)]
    assert kinds(divided, md.Layout(cp=3), (1, 7)) == [(0, 1), (1, 1), (2, 1)]  # 3, 2 and 2 tokens in a ring
    assert kinds(subject_of("byte-tiny").divided, md.Layout(dp=3, pp=2), (4, 64)) == [
        (0, 1),
        (1, 2),
        (3, 1),
        (4, 2),
    ]
    found = dryrun_kinds("byte-tiny", md.Layout(dp=3), (4, 8))
    assert [(run.rank, run.batch, count) for run, count in found] == [(0, (4, 8), 1), (1, (4, 8), 2)]


@pytest.mark.parametrize(
    ("name", "layout"), [("bert-tiny", "dp=2,zero=3"), ("bert-tiny-mlm", "tp=2,pp=2,micro_batches=2")]
)
def test_a_bert_holds_what_is_estimated(name: str, layout: str) -> None:
    chosen = md.Layout.parse(layout)
    found, held = dryrun(name, chosen, (8, 32)), estimate(name, chosen, batch=(8, 32), rank=0)
    for part in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(found.memory, part) == pytest.approx(getattr(held, part), rel=0.01)


# The command.


def test_the_command_says_bytes_memory_time_and_assumptions(run: Run) -> None:
    code, out, _ = run("dryrun", "--model", "byte-tiny", "--layout", "dp=2,tp=2,zero=1")
    assert code == 0
    for said in ("reduce_scatter", "activations", "of h100's", "optimizer", "step", "Assumed:"):
        assert said in out


def test_a_program_may_read_it(run: Run) -> None:
    layout = "pp=2,micro_batches=2"
    words = ("dryrun", "--model", "byte-tiny", "--layout", layout, "--rank", "kinds", "--json")
    code, out, _ = run(*words)
    found = json.loads(out)
    assert code == 0
    assert [each["alike"] for each in found["runs"]] == [1, 1]
    assert [each["place"]["pp"] for each in found["runs"]] == [0, 1]
    assert found["time"]["seconds"] > 0
    assert found["time"]["assumptions"]
    for each in found["runs"]:
        assert each["bytes_sent"] == sum(line["bytes_sent"] for line in each["calls"])


test_what_cannot_be_run_dry_is_refused = refuses(
    lambda **given: dryrun("byte-tiny", md.Layout(dp=2, zero=3 * ("fully_shard" in given)), **given),
    ({"data_parallel": {"algorithm": "ring"}}, "algorithm is 'ring'"),
    ({"data_parallel": {"compression": "topk"}}, "compression is 'topk'"),
    ({"data_parallel": {"compression": TopK(0.1)}}, "compression is TopK"),
    ({"fully_shard": {"offload": "/scratch"}}, "writes no files"),
    ({"way": "carrier pigeon"}, "unknown way"),
    ({"rank": None}, TypeError, "rank is None"),
)


def test_algorithms_whose_messages_it_cannot_send_are_refused() -> None:
    with comm.using("ring"), pytest.raises(ValueError, match=r"an algorithm.*call it outside comm\.using"):
        dryrun("byte-tiny", md.Layout(dp=2))


def test_experts_that_drop_tokens_are_refused() -> None:
    shape = GPTConfig(context=16, layers=1, heads=2, width=16, experts=4, capacity=0.5)
    with pytest.raises(ValueError, match=r"capacity is 0.5, so that experts drop tokens.*give at least 1"):
        dryrun(shape, md.Layout(dp=2, ep=2))


def test_a_time_says_which_options_it_leaves_out() -> None:
    def assumed(layout: md.Layout, **options: Any) -> list[str]:
        return dryrun("byte-tiny", layout, 4, **options).predict().assumptions

    plain, sharded = md.Layout(dp=2), md.Layout(dp=2, zero=3)
    usual = assumed(plain)
    assert dryrun("byte-tiny", plain, 4).predict("a100") == predict_step("byte-tiny", plain, 4, "a100")
    *rest, said = assumed(plain, data_parallel={"compression": "float16", "bucket_mb": 1})
    assert rest == usual == assumed(plain, data_parallel={})
    assert said.startswith("the time ignores compression='float16' and bucket_mb=1, which")
    assert "offload='cpu'" in assumed(sharded, fully_shard={"offload": "cpu"})[-1]
    four = md.Layout(dp=4, zero=3)
    assert assumed(four, fully_shard={"secondary": 2}) == assumed(four)  # the time knows it


def in_a_world() -> str:
    try:
        dryrun("byte-tiny", md.Layout(dp=2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_of_a_real_world_makes_no_other(cluster_of: Clusters) -> None:
    assert "call it in another process" in cluster_of(2).run(in_a_world)[0]
