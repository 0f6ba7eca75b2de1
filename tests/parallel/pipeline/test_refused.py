"""What a pipeline cannot do is told in a sentence: wrong arguments, ranks that differ, a step that fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP, cross_entropy
from minidist.parallel import schedules
from minidist.parallel.layerwise.layer_by_layer import LayerByLayer, cut
from minidist.parallel.pipeline.execution import Pipeline
from minidist.parallel.schedules.instructions import Instruction
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refused_on_ranks, refuses

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.1)
LAYER = nn.Linear(2, 2)
X, Y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
PLAIN: Any = [[("forward", 0), ("backward", 0)]]
ONE: Any = schedules.gpipe(2, 2)

TWO = [nn.Identity(), nn.Identity()]


test_arguments_of_wrong_types_are_told = refuses(
    lambda call: call(),
    (lambda: Pipeline(None), "stages is None; give this rank's module"),  # type: ignore[arg-type]
    (partial(Pipeline, []), r"stages is \[\]; give this rank's module, or one for each chunk"),
    (lambda: LayerByLayer([LAYER]), r"part is a list; give a .* with this rank's layers"),  # type: ignore[arg-type]
    (lambda: Pipeline([None]), r"stages is \[None\]; give this"),  # type: ignore[list-item]
    (partial(Pipeline, LAYER, None), "schedule is None; give a name such as '1f1b', or"),
    (partial(Pipeline, LAYER, 3), "schedule is 3; give a name such as '1f1b', or"),
    (partial(Pipeline, LAYER, schedules.gpipe), "schedule is the function gpipe; give a name"),
    (partial(Pipeline, LAYER, PLAIN), r"the schedule has \('forward', 0\) for rank 0; give instruc"),
    (partial(Pipeline, LAYER, loss=None), "loss is None; give a function from outputs and targets"),
    (partial(Pipeline, LAYER, loss=3), "loss is 3; give a function from outputs and targets"),
    (partial(Pipeline, LAYER, tied=LAYER.weight), "tied is Parameter; give a list with a parameter"),
    (partial(Pipeline, LAYER, tied=[3]), r"tied is \['int'\]; give a list with a parameter, or None"),
    (partial(LayerByLayer, LAYER, loss=None), "loss is None; give a function from outputs"),
    (lambda: Pipeline(LAYER).step(X.tolist(), Y), "the inputs are a list; give a tensor whose first"),
    (lambda: Pipeline(LAYER).step(X, Y[0]), "the targets are a tensor without dimensions; give"),
    (lambda: Pipeline(LAYER).step(X, None), "the targets are a NoneType; give a tensor"),  # type: ignore[arg-type]
    (lambda: Pipeline(LAYER).evaluate(None, Y), "the inputs are a NoneType"),  # type: ignore[arg-type]
    (partial(Pipeline(LAYER).evaluate, X, Y, 3), "metric is 3; give a function from outputs and"),
    (partial(LayerByLayer(LAYER).step, 3, Y), "the inputs are a int; give a tensor"),
    (partial(schedules.check, "gpipe"), "schedule is 'gpipe'; give a list of instructions"),
    (partial(schedules.check, None), "schedule is None; give a list of instructions"),
    (partial(schedules.check, PLAIN), r"the schedule has \('forward', 0\) for rank 0; give ins"),
    (partial(schedules.check, [3]), "the schedule has 3 for rank 0; give a list of instructions"),
    (partial(schedules.forward_only, None), "schedule is None; give a list of instructions"),
    (partial(schedules.with_messages, PLAIN), r"the schedule has \('forward', 0\) for rank 0"),
    (partial(schedules.simulate, None), "schedule is None; give a list of instructions for each"),
    (partial(schedules.simulate, ONE, 3), "times is 3; give a dict of seconds, such as"),
    (partial(schedules.plot, None), "schedule is None; give a list of instructions for each rank"),
    (partial(Instruction, "forward", "0"), r"micro_batch is '0' \(str\); give an integer"),
    error=TypeError,
)


test_wrong_values_are_told = refuses(
    lambda call: call(),
    (partial(schedules.with_messages, ONE), "the schedule has send F0 for rank 0 already; give what they"),
    (partial(schedules.by_name, "gpip", 2, 2), "unknown schedule 'gpip': did you mean 'gpipe'"),
    (partial(schedules.gpipe, 2, 0), "micro_batches is 0; give at least 1"),
    (partial(schedules.zero_bubble, 2, 4, 2), "chunks is 2, and this schedule has one chunk a rank"),
    (partial(Instruction, "forwards", 0), "unknown kind of instruction 'forwards'"),
    (partial(schedules.simulate, ONE, {"backwards": 1}), "unknown time 'backwards'"),
    (
        partial(schedules.simulate, ONE, {"forward": [1, 2, 3]}),
        "give seconds of 0 or more, a number or 2 of them",
    ),
    (
        partial(schedules.simulate, ONE, {"forward": "long"}),  # type: ignore[dict-item]
        "the times of forward are 'long'; give seconds of 0 or more",
    ),
    (partial(Pipeline, LAYER, reduction="average"), "reduction is 'average'; give 'mean' or 'sum'"),
    (partial(Pipeline, LAYER, "1f2b"), "unknown schedule '1f2b': did you mean '1f1b'"),
    (partial(Pipeline, LAYER, micro_batches=0), "micro_batches is 0"),
    (
        partial(Pipeline, [LAYER, LAYER]),
        "chunks is 2, and this schedule has one chunk a rank; take interleaved",
    ),
    (lambda: Pipeline(LAYER).step(X[:3], Y[:2]), "inputs have 3 rows and targets 2"),
    (lambda: Pipeline(LAYER).step(X[:0], Y[:0]), "inputs have no rows; give a batch of at least one"),
    (lambda: LayerByLayer(LAYER).step(X[:0], Y[:0]), "inputs have no rows; give a batch of at least one"),
    (partial(cut, TWO, 3), "parts is 3 and there are 2 layers; give 1 to 2"),
    (partial(cut, TWO, 2, [1.0]), "give one of 0 or more"),
)


@pytest.mark.parametrize("kind", [Pipeline, LayerByLayer])
def test_a_step_without_gradients_is_told(kind: Any) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off here"):
        kind(LAYER).step(X, Y)


def test_the_legend_tells_the_chunks_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    axes = schedules.plot(schedules.interleaved(2, 4, 4), path=tmp_path / "schedule.png")
    legend = axes.get_legend()
    names = [f"{kind}, chunk {chunk}" for kind in ("forward", "backward") for chunk in range(4)]
    assert [text.get_text() for text in legend.get_texts()] == names
    shades = {patch.get_facecolor() for patch in axes.patches}
    assert shades == {patch.get_facecolor() for patch in legend.get_patches()}
    box = legend.get_window_extent()
    assert box.y0 >= 0  # all of it is in the picture
    assert box.y1 <= axes.get_figure().bbox.y1


stage = partial(nn.Linear, 2, 2)
DIFFER: dict[str, tuple[Callable[[int], Any], str]] = {
    "micro-batches": (
        lambda rank: Pipeline(stage(), micro_batches=2 + rank),
        "Pipeline got micro_batches 3 on rank 1 and 2 on rank 0; give all ranks the same",
    ),
    "schedule": (
        lambda rank: Pipeline(stage(), ["gpipe", "zero_bubble"][rank]),
        "Pipeline got schedule 'zero_bubble' on rank 1 and 'gpipe' on rank 0",
    ),
    "own schedule": (
        lambda rank: Pipeline(stage(), [schedules.gpipe, schedules.zero_bubble][rank](2, 3)),
        "Pipeline got schedule of your own, ",
    ),
    "loss": (
        lambda rank: Pipeline(stage(), reduction=["mean", "sum"][rank]),
        "Pipeline got reduction sum on rank 1 and mean on rank 0",
    ),
    "tied": (
        lambda rank: Pipeline(stage(), tied=[None] * rank),
        "Pipeline got tied copies 1 on rank 1 and 0 on rank 0",
    ),
    "axes": (
        lambda rank: md.prepare(MLP((2, 3, 2)), SGD, [PARSE("pp=2"), PARSE("dp=2")][rank]),
        "md.prepare got dp 2 on rank 1 and 1 on rank 0",
    ),
    "layout": (
        lambda rank: md.prepare(MLP((2, 3, 2)), SGD, md.Layout(pp=2, micro_batches=2 + rank)),
        "md.prepare got micro_batches 3 on rank 1 and 2 on rank 0",
    ),
    "clipping": (
        lambda rank: md.prepare(MLP((2, 3, 2)), SGD, md.Layout(dp=2), clip_norm=[None, 1.0][rank]),
        "md.prepare got clip_norm 1.0 on rank 1 and None on rank 0",
    ),
}


def test_ranks_that_were_given_other_arguments_are_told(cluster_of: Clusters) -> None:
    for call, message in DIFFER.values():
        refused_on_ranks(cluster_of(2), ValueError, message, lambda call=call: call(md.rank()))


@on_ranks(2, layout=["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_a_step_without_gradients_sends_nothing(layout: str) -> None:
    plan = {"plan": {"layers.0.linear": "column", "layers.1.linear": "row"}} if "tp" in layout else {}
    engine = md.prepare(MLP((2, 4, 2)), SGD, PARSE(layout), **plan)  # type: ignore[arg-type]
    told = []
    with md.comm.ledger() as ledger:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, pytest.raises(RuntimeError) as caught:
                engine.step(X, Y)
            told.append(str(caught.value))
    assert all(text.startswith("gradients are off here, as in torch.no_grad() or") for text in told)
    assert not ledger.calls
    assert engine.step(X, Y) > 0


class Fails:
    """A loss that fails once."""

    now = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.now:
            self.now = False
            raise ZeroDivisionError("once")
        return cross_entropy(outputs, targets)


def test_a_step_that_fails_on_one_rank_fails_on_all_and_they_go_on(cluster_of: Clusters) -> None:
    def train(engine: bool, fail: bool) -> tuple[list[float], str]:
        loss, model = Fails(), MLP((2, 3, 4, 3, 2), dtype=torch.float64)
        x = torch.arange(8.0, dtype=torch.float64).view(4, 2)
        if engine:
            step = md.prepare(model, SGD, PARSE("pp=4,micro_batches=2"), loss=loss).step
        else:
            step = Pipeline(model.layers[md.rank()], "1f1b", 2, loss=loss).step  # type: ignore[arg-type]
        losses, told = [step(x, Y)], ""
        for _ in range(2 if fail else 0):
            loss.now = True
            try:
                step(x, Y)
            except (ZeroDivisionError, md.CollectiveError) as error:
                told = f"{type(error).__name__}: {error}"
            loss.now = False
        return [*losses, *(step(x, Y) for _ in range(2))], told

    for engine in (True, False):
        expected = cluster_of(4).run(train, engine, False)
        found = cluster_of(4).run(train, engine, True)
        assert [losses for losses, _ in found] == [losses for losses, _ in expected]
        assert found[3][1] == "ZeroDivisionError: once"
        for rank in range(3):
            assert f"on rank {rank} with ranks 0, 1, 2, 3: rank {rank + 1} failed, and" in found[rank][1]
