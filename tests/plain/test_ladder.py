"""The training ladder as a whole: its table is true, and all its pages have the same shape."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import minidist as md
from minidist import comm, plain
from minidist.plain import experts, one_process
from minidist.plain.gpt import Block, loss_of
from tests.conftest import Clusters
from tests.helpers.plain_rungs import ADAMW, EXACT, Parameters, draw_batches, parameters_of, small, train

ROOT = Path(__file__).parents[2]
FILES = sorted(path.stem for path in (ROOT / "minidist/plain").glob("*.py") if path.stem != "__init__")


def test_the_table_names_the_rungs_in_the_order_of_reading() -> None:
    assert tuple(re.findall(r"\| (\w+)\.py \|", plain.__doc__ or "")) == plain.LADDER
    assert set(FILES) - {"gpt", "placements"} == set(plain.LADDER)


@pytest.mark.parametrize("rung", plain.LADDER)
def test_a_rung_is_a_page(rung: str) -> None:
    module = importlib.import_module(f"minidist.plain.{rung}")
    assert len(inspect.getsource(module).splitlines()) <= 120
    parameters = inspect.signature(module.train, eval_str=True).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    assert needed == ["model", "batches", "make_optimizer"]
    imported = {
        name
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minidist")
        for name in [f"{node.module}.{alias.name}" for alias in node.names]
    }
    assert all(name == "minidist.comm" or name.startswith("minidist.plain.gpt.") for name in imported)


def test_the_example_runs(
    cluster_of: Clusters,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [example] = re.findall(r"^(    import functools.*)", inspect.getsource(plain), re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(md, "launch", lambda train, ranks: cluster_of(ranks).run(train))
    exec(textwrap.dedent(example.partition('"""')[0]), {})
    losses = ast.literal_eval(capsys.readouterr().out)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


# What a rung gives back: the whole model, as one process leaves it.


@dataclass
class Returned:
    """What one rank finds in the model that a rung has trained, and in a second training by `one_process`."""

    shown: str
    loss: float
    weights: Parameters
    left: tuple[int, int]  # hooks, and calls of communication while the rank looks and trains by itself
    losses: list[float]
    trained: Parameters


def trained_again(rung: str, options: dict[str, Any], mistake: tuple[str, str] = ("", "")) -> Returned:
    model, [(inputs, targets)] = small(), draw_batches(1)
    one_process.train(model, draw_batches(1), ADAMW)  # leaves gradients, which the rung has to ignore
    train(rung, options, draw_batches(2), mistake=mistake, model=model)
    with comm.ledger() as ledger:
        with torch.no_grad():
            loss = loss_of(model(inputs), targets).item()
        shown, weights = repr(model), parameters_of(model)
        losses = one_process.train(model, [(inputs, targets)] * 3, ADAMW)
    kept = [hooks for layer in model.modules() for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
    kept += [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    left = sum(map(len, kept)), len(ledger.calls)
    return Returned(shown, loss, weights, left, losses, parameters_of(model))


def check_returned(ranks: list[Returned], rung: str) -> None:
    for found in ranks:
        fresh, batches = small(seed=1), draw_batches(1)
        for i, layer in enumerate(fresh):
            if rung == "experts" and isinstance(layer, Block):
                fresh[i] = experts.ExpertBlock(layer, 4).double()
        fresh.load_state_dict(found.weights)
        with torch.no_grad():
            loss = loss_of(fresh(batches[0][0]), batches[0][1]).item()
        losses = one_process.train(fresh, batches * 3, ADAMW)
        assert (found.shown, found.left) == (repr(fresh), (0, 0))
        torch.testing.assert_close(
            (found.loss, found.losses, found.trained), (loss, losses, parameters_of(fresh)), **EXACT
        )
        torch.testing.assert_close(found.weights, ranks[0].weights, rtol=0, atol=0)
        assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("rung", "options"),
    [(rung, {}) for rung in plain.LADDER]
    + [("sharded", {"row": row}) for row in ("data parallel", "ZeRO 1", "ZeRO 2")],
)
def test_a_rung_gives_back_a_clean_model(cluster_of: Clusters, rung: str, options: dict[str, Any]) -> None:
    """Whole and the same on all ranks; it prints, runs on one rank alone, and trains as a new model would."""
    check_returned(cluster_of(2).run(trained_again, rung, options), rung)


@pytest.mark.parametrize(
    ("rung", "options", "old", "new"),
    [
        ("overlap", {}, "hook.remove()", "pass"),
        ("sharded", {"row": "ZeRO 1"}, "hook.remove()", "pass"),
        ("sharded", {"row": "ZeRO 2"}, "hook.remove()", "pass"),
        ("layer_by_layer", {}, "same_weights(own_layers(model, owner), owner)", "pass"),
        ("pipeline", {}, "same_weights(own_layers(model, owner), owner)", "pass"),
        ("tensor_parallel", {}, "    block.__class__ = Block\n", ""),
        ("sequence_parallel", {}, "block.attention.heads *= comm.size()", "pass"),
        ("ring_attention", {}, "block.attention.__class__ = Attention\n", "pass\n"),
        ("experts", {}, "same_weights(mlp, i // k)", "pass"),
        ("local_sgd", {}, " or step == len(batches)", ""),
    ],
)
def test_what_a_rung_leaves_behind_is_found(
    cluster_of: Clusters, rung: str, options: dict[str, Any], old: str, new: str
) -> None:
    ranks = cluster_of(2).run(trained_again, rung, options, (old, new))
    with pytest.raises(AssertionError):
        check_returned(ranks, rung)
