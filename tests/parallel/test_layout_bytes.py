"""What a step sends along each axis of a mesh, to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.parallel.context_parallel.attention_in_a_ring import ring_bytes
from minidist.parallel.tensor_parallel.shares import share_of
from tests.conftest import Clusters
from tests.helpers.models import tokens
from tests.helpers.step_bytes import bytes_per_pass
from tests.parallel.test_layouts import SGD, gpt

ROWS, LENGTH, BLOCKS, WIDTH, HEADS, VOCABULARY, F64 = 4, 8, 2, 16, 8, 11, 8
Sent = tuple[dict[str, int], int, int]


def third_step(layout: md.Layout, **options: Any) -> tuple[md.Engine, list[Any]]:
    """An engine, and the calls of its third step."""
    engine = md.prepare(gpt(md.rank(), layers=BLOCKS), SGD, layout, **options)
    inputs, targets = tokens(torch.Generator().manual_seed(engine.data_rank), ROWS, LENGTH)
    for _ in range(3):
        with comm.ledger() as ledger:
            engine.step(inputs, targets)
    return engine, ledger.calls


def count(layout: md.Layout) -> Sent:
    """Bytes by axis; elements and number of this rank's parameters."""
    engine, calls = third_step(layout, clip_norm=0.5)
    axes = ("tp", "pp", "cp", "dp_cp")
    names = {engine.mesh.ranks(axis): axis for axis in axes} | {tuple(range(md.size())): "world"}
    sent = Counter(dict.fromkeys(names.values(), 0))
    for call in calls:
        sent[names[call.group]] += call.bytes_sent
    parameters = [*engine.model.parameters()]
    return dict(sent), sum(p.numel() for p in parameters), len(parameters)


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,pp=2,zero=1,sequence_parallel=true",
        "dp=2,pp=2,cp=2,micro_batches=4",
        "dp=2,tp=2,cp=2,zero=1",
    ],
)
def test_every_axis_sends_what_its_formula_says(cluster_of: Clusters, text: str) -> None:
    layout = md.Layout.parse(text)
    found = cluster_of(8).run(count, layout)
    per_stage = layout.ranks // layout.pp
    for rank, (sent, elements, parameters) in enumerate(found):
        # One norm, over all ranks.
        if layout.tp * layout.pp > 1:
            assert sent["world"] == all_reduce_bytes(F64, layout.ranks)

        # Gradients: a bucket, with counts of use and two totals at its end; with ZeRO in two halves.
        n = layout.dp * layout.cp
        if layout.zero:
            share = -(-elements // n)
            assert sent["dp_cp"] == 2 * (n - 1) * share * F64 + all_reduce_bytes(F64 * (parameters + 3), n)
        else:
            assert sent["dp_cp"] == all_reduce_bytes(F64 * (elements + parameters + 2), n)

        # A pipeline: the stream forward, its gradient back; the loss; the tied table to the other end.
        if layout.pp > 1:
            stream = ROWS * LENGTH // layout.cp * WIDTH * F64
            if layout.sequence_parallel:
                stream //= layout.tp
            table = len(share_of(VOCABULARY, rank % layout.tp, layout.tp))
            # Its gradient from both; and where ranks have parts of the sum alone, the first one's values.
            times = 2 if layout.zero and rank < per_stage else 1
            whether_used = F64
            table_sent = times * table * WIDTH * F64 + whether_used
            assert sent["pp"] == stream + all_reduce_bytes(F64, layout.pp) + table_sent

        # Attention goes round the ring, in each block of this stage.
        if layout.cp > 1:
            place = rank // layout.tp % layout.cp
            sizes = {"batch": ROWS, "key_heads": HEADS // layout.tp, "head_size": WIDTH // HEADS}
            both = [
                ring_bytes(LENGTH, layout.cp, place, dtype=torch.float64, backward=back, **sizes)
                for back in (False, True)
            ]
            shapes = 64 * (layout.cp - 1) * (layout.micro_batches - 1)  # told for each micro-batch
            assert sent["cp"] == BLOCKS // layout.pp * (sum(both) + shapes)

    # Tensor parallelism: over the stages together that of the whole model.
    if layout.tp > 1:
        shape = gpt(0, layers=BLOCKS).config
        rows, passes = ROWS // layout.micro_batches, layout.micro_batches
        one = bytes_per_pass(shape, rows, LENGTH // layout.cp, layout.tp, layout.sequence_parallel, F64)
        for first in range(per_stage):
            assert sum(sent["tp"] for sent, *_ in found[first::per_stage]) == passes * one


def order(layout: md.Layout) -> list[str]:
    """The axes along which a step sends, in order: with a message for each gradient."""
    engine, calls = third_step(layout, data_parallel={"bucket_mb": 0})
    names = {engine.mesh.ranks(axis): axis for axis in ("pp", "dp_cp")}
    return [names[call.group] for call in calls if call.name in ("all_reduce", "send")]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_gradients_are_on_their_way_before_the_last_message_to_the_stage_before(
    cluster_of: Clusters, schedule: str
) -> None:
    found = cluster_of(4).run(order, md.Layout(dp=2, pp=2, micro_batches=2, schedule=schedule))
    for axes in found[2:]:  # the last stage's ranks
        first_sum, messages = axes.index("dp_cp"), [i for i, axis in enumerate(axes) if axis == "pp"]
        # After two gradients of activations come the tied table and the loss.
        if schedule == "zero_bubble":
            assert first_sum > messages[1]  # inputs' gradients go first of all
        else:
            assert messages[0] < first_sum < messages[1]
