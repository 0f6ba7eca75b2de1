"""Muon trains every layout to the weights of one process, and sends what its formulas say."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import minidist as md
from minidist import comm
from minidist.parallel.flat.bucket_layout import WholeTensors
from minidist.parallel.flat.joined_messages import deal_whole
from minidist.parallel.sharding.optimizer.whole_on_owners import WholeOnOwners
from minidist.parallel.sharding.units.gathered_model import named_shards
from minidist.parallel.training import muon
from minidist.scale.step_time.gradient_exchange import PRODUCTS
from minidist.scale.step_time.prediction import predict_step
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.models import Logits, tokens
from tests.parallel.sharding.cases import CASES, own_loop

MUON = partial(md.Muon, lr=0.05, weight_decay=0.1)
gpt = partial(models.gpt, heads=4, tied=False)
CASE = contract.Case(gpt, tokens, MUON, batches=(6, 7, 8), clip_norm=0.5)
EXPERTS = contract.Case(partial(gpt, experts=4), tokens, MUON, batches=(6, 7), clip_norm=0.5)


@pytest.mark.parametrize(
    "text",
    [
        "dp=3",
        "dp=2,zero=1",
        "dp=3,zero=2,micro_batches=2",
        "dp=3,zero=3,micro_batches=2",
        "dp=4,shard=2,zero=3,recompute=True",
        "tp=2,sequence_parallel=true",
        "tp=3",
        "dp=2,tp=2,zero=1",
        "dp=2,tp=2,zero=2",
        "dp=2,tp=2,zero=3",
        "dp=2,tp=3,zero=1",
        "dp=2,tp=3,zero=2",
        "pp=2,micro_batches=2",
        "dp=2,pp=2,zero=1,micro_batches=2",
        "dp=2,cp=2,zero=3",
    ],
)
def test_every_layout_equals_one_process(cluster_of: Clusters, text: str) -> None:
    contract.check(cluster_of, CASE, text)


@pytest.mark.parametrize("name", ["GPT-2", "Phi-3"])
def test_matrices_packed_in_one_are_joined(cluster_of: Clusters, name: str) -> None:
    case = contract.Case(partial(Logits, name), partial(tokens, vocabulary=13), MUON, batches=(4, 5))
    contract.check(cluster_of, case, md.Layout(tp=2))


@pytest.mark.parametrize("text", ["dp=2,ep=2,zero=3", "dp=2,ep=2,tp=2,zero=1"])
def test_each_expert_is_a_matrix_by_itself(cluster_of: Clusters, text: str) -> None:
    contract.check(cluster_of, EXPERTS, text)


@pytest.mark.parametrize(
    "texts",
    [
        ("dp=2,zero=3", "dp=2,tp=2,zero=1", "dp=3,zero=2"),
        ("tp=2", "dp=2,tp=2,zero=3", "pp=2,micro_batches=2"),
    ],
)
def test_a_checkpoint_goes_on_in_other_layouts(
    cluster_of: Clusters, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    contract.check_continues(cluster_of, tmp_path, CASE, *texts)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_it_works_in_a_loop_of_ones_own(cluster_of: Clusters, zero: int) -> None:
    case = replace(CASES["mlp"], optimizer=MUON)
    for trained in cluster_of(2).run(own_loop, zero, case):
        contract.compare(trained, contract.train_in_one_process(case))


@pytest.mark.parametrize("shared", [False, True])
def test_an_added_group_for_adamw_has_its_rate(shared: bool) -> None:
    first, bias, other = (torch.nn.Parameter(torch.ones(shape)) for shape in [(3, 3), 3, 2])
    pairs, rates = [("l.weight", first)], {"lr": 0.02, "adamw_lr": 3e-4}
    optimizer = md.ZeroOptimizer(pairs, md.Muon, **rates) if shared else md.Muon(pairs, **rates)
    for more in ({"params": [bias]}, {"params": [other], "lr": 0.1}):
        optimizer.add_param_group({"elementwise": True, **more})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4, 3e-4, 0.1]
    bias.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((3,), 1 - 3e-4))  # AdamW's first step


@pytest.mark.parametrize(
    ("shape", "hidden", "others"),
    [
        (
            (4, 4),
            "ensemble.0.weight members.1.weight proposition.weight 0.weight layers.1.attention.output.weight"
            " layers.1.mlp.experts.0.up.weight",
            "layers.0.token.weight layers.0.position.weight layers.2.output.weight transformer.wte.weight"
            " model.embed_tokens.weight lm_head.weight bert.embeddings.word_embeddings.weight head.weight"
            " token_type_embedding.weight tok_emb.weight pos_embed segment.weight n_embd.weight emb1.weight",
        ),
        (
            (4, 4, 3),
            "layers.1.mlp.experts.up experts.down layers.0.mlp.experts.gate_up_proj moe.w1",
            "conv1.weight mixer.conv1d.weight weight experts_embeddings.weight",
        ),
        ((4,), "", "0.bias experts.bias"),
        ((4, 4, 3, 3), "", "conv.weight experts.conv.weight"),
    ],
)
def test_names_and_dimensions_say_what_is_hidden(shape: tuple[int, ...], hidden: str, others: str) -> None:
    names, parameter = [*hidden.split(), *others.split()], torch.ones(shape)
    assert [name for name in names if muon.is_hidden(name, parameter)] == hidden.split()


# The mathematics.


@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7), (4, 6, 2)])
def test_singular_values_go_through_the_polynomial(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values /= values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        a, b, c = muon.COEFFICIENTS
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(
        muon.orthogonalized(matrix), u * values[..., None, :] @ v, rtol=1e-10, atol=1e-10
    )
    assert ((values > 0.6) & (values < 1.3)).all()


def test_it_moves_as_torch_does() -> None:
    """Torch orthogonalizes in bfloat16, which has three digits."""
    start = torch.randn(24, 8)
    mine, its = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours = md.Muon([mine], lr=0.1, weight_decay=0.1)
    torchs = torch.optim.Muon([its], lr=0.1, weight_decay=0.1)
    for _ in range(5):
        mine.grad = its.grad = torch.randn(24, 8)
        ours.step()
        torchs.step()
    assert (mine - its).norm() < 0.02 * (its - start).norm()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 4, 5)])
def test_its_work_is_counted(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalized(torch.randn(shape))
    assert counter.get_total_flops() == PRODUCTS * md.Muon.work(shape)


def test_the_prediction_shares_the_work_and_counts_the_messages() -> None:
    def update(text: str) -> float:
        layout = md.Layout.parse(text)
        return predict_step("gpt2-medium", layout, (8, 1024), "h100", optimizer="muon").parts["optimizer"]

    assert update("dp=8") / update("dp=8,zero=1") == pytest.approx(8, rel=0.1)
    assert update("dp=8,zero=1") < update("dp=8,zero=3") < update("dp=4")


def test_wrong_arguments_are_refused() -> None:
    vector = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \(3,\), which is neither a matrix nor a stack.*elementwise"):
        md.Muon([{"params": [vector]}])
    with pytest.raises(ValueError, match="momentum is 1; give at least 0, and a momentum below 1"):
        md.Muon([vector], momentum=1)
    wrong = {"lr": torch.nan, "adamw_lr": -1, "weight_decay": -1, "eps": -1, "steps": -1, "betas": (0.9, 1)}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"{name}\S* is .*; give at least 0"):
            md.Muon([vector], **{name: value})  # type: ignore[arg-type]


# What travels, and who works.


def sent_in_a_step(text: str) -> tuple[int, int, int, int]:
    """Bytes of the all-to-alls, of all calls, and of the engine's formula; and what should be swapped."""
    engine: Any = md.prepare(gpt(md.rank()), MUON, md.Layout.parse(text), rehearse=False)
    for batch in CASE.global_batches()[:2]:
        engine.step(contract.own_rows(engine, batch))
    with comm.ledger() as ledger:
        engine.step(contract.own_rows(engine, CASE.global_batches()[2]))
    swapped = sum(call.bytes_sent for call in ledger.calls if call.name == "all_to_all")
    expected, shared = 0, engine.strategy
    if "zero=3" in text:  # what it has of others' matrices, and what others have of its own
        owned = {shared.name_of(each.ranges[0].param_index) for each in shared.slices.all if not each.cuts}
        for name, span, _ in named_shards(shared):
            if re.search("query|key|value|attention.output|up|down", name) and name.endswith("weight"):
                expected += 8 * len(span) * (1 if name not in owned else -1)
        expected += 8 * sum(each.value.numel() for each in shared.slices.all if not each.cuts)
    return swapped, ledger.bytes_sent, engine.strategy.bytes_per_step(), expected


MATRICES = 2 * 12 * 8 * 8
"""Elements of the hidden matrices: in each of two blocks 4 of (8, 8), one of (32, 8) and one of (8, 32)."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_3_sends_each_part_to_its_owner_and_back(cluster_of: Clusters, ranks: int) -> None:
    found = cluster_of(ranks).run(sent_in_a_step, f"dp={ranks},zero=3")
    for swapped, sent, formula, expected in found:
        assert (swapped, sent) == (expected, formula)
    assert 0 < sum(swapped for swapped, *_ in found) <= 2 * 8 * MATRICES


def test_tp_sends_the_parts_of_cut_matrices_alone(cluster_of: Clusters) -> None:
    for text in ("tp=2", "tp=4"):
        found = cluster_of(int(text[-1])).run(sent_in_a_step, text)
        ranks = len(found)
        assert sum(swapped for swapped, *_ in found) == 2 * 8 * MATRICES * (ranks - 1) // ranks


def test_zero_1_sends_what_adamw_does(cluster_of: Clusters) -> None:
    for swapped, sent, formula, _ in cluster_of(2).run(sent_in_a_step, "dp=2,zero=1"):
        assert (swapped, sent) == (0, formula)


@pytest.mark.parametrize(
    ("width", "layers", "owners", "padding"),
    [(768, 12, 2, 1.2), (768, 12, 8, 1.2), (1600, 48, 32, 1.2), (768, 12, 16, 4 / 3)],  # 16: three each
)
def test_owners_have_about_the_same_work(width: int, layers: int, owners: int, padding: float) -> None:
    """Of GPT-2's matrices, in the buckets of ZeRO 1 and 2, and all at once as with ZeRO 3."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    dealt = deal_whole(tensors, range(len(tensors)), 25 * 2**20, WholeTensors(md.Muon.work, owners))
    assert sorted(i for part in dealt for i in part) == [*range(len(tensors))]
    for parts in (dealt, [range(len(tensors))]):
        deal = WholeTensors(md.Muon.work, owners)
        padded = sum(owners * deal([tensors[i] for i in part], owners)[1] for part in parts)
        assert padded <= padding * sum(x.numel() for x in tensors)
        assert max(deal.loads) <= 1.2 * sum(deal.loads) / owners


# Planted faults.


@contract.instead_of(WholeOnOwners, "give_values")
def a_matrix_is_skipped(give: Any, self: Any) -> None:
    """With ZeRO 3 nobody takes the last matrix's update back to the shards."""
    shard = self._homes[-1][0].values.shard
    kept = shard.clone()
    give(self)
    shard.copy_(kept)


@contract.instead_of(md.Muon, "_orthogonalize_cut")
def each_part_by_itself(_: Any, self: md.Muon, cut: list[Any], steps: int) -> None:
    """Each rank of tp orthogonalizes its part of a matrix."""
    for _, update in cut:
        update.copy_(muon.orthogonalized(update, steps))


@contract.instead_of(muon, "orthogonalized")
def transposed(right: Any, x: Any, steps: int) -> Any:
    """A matrix arrives with rows and columns swapped."""
    return right(x.reshape(x.mT.shape), steps).reshape(x.shape)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (a_matrix_is_skipped, "dp=2,zero=3"),
        (each_part_by_itself, "tp=2"),
        (transposed, "dp=2,zero=1"),
        (transposed, "tp=2"),
    ],
)
def test_the_contract_catches_a_planted_fault(fault: contract.Fault, text: str, cluster_of: Clusters) -> None:
    contract.check_catches(cluster_of, fault, CASE, text, rehearse=False)
