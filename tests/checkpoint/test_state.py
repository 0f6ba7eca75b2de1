"""State dicts that are not plain: hooks that rename, extra state, empty parameters, expanded buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from tests.conftest import Clusters
from tests.helpers.refusals import refused_on_ranks

LAYOUTS = [md.Layout(dp=2, zero=zero) for zero in (0, 1, 3)]


class Odd(nn.Module):
    """A layer; how: what is odd about its state_dict."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.told, self.how = nn.Linear(3, 3), {"calls": 0, "table": torch.ones(2)}, how
        if how in ("renames", "copies"):
            self._register_state_dict_hook(self.rename)
        if how == "empty":
            self.none = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("one", torch.ones(1).expand(4))

    @staticmethod
    def rename(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        weight = state.pop(prefix + "linear.weight")
        state[prefix + "kernel"] = weight.clone() if module.how == "copies" else weight

    def get_extra_state(self) -> Any:
        return object() if self.how == "unknown" else self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


class Plain(Odd):
    """The same without extra state."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def prepared(model: nn.Module, layout: md.Layout) -> Any:
    return md.prepare(model, partial(torch.optim.Adam, lr=0.1), layout)


def trained(kind: type[Odd], how: str, layout: md.Layout) -> Any:
    engine = prepared(kind(how), layout)
    engine.step(torch.ones(2, 3) + md.rank(), torch.tensor([0, 1]))
    return engine


def round_trip(kind: type[Odd], how: str, layout: md.Layout, folder: Path) -> tuple[dict[str, Any], Any]:
    """What an engine's and its checkpoint's exports hold, which is the same; and the model after a load."""
    engine = trained(kind, how, layout)
    if kind is Odd:
        engine.model.told["calls"] = 7
    md.save(engine, folder / "saved")
    md.export(engine, folder / "engine.pt")
    if md.rank() == 0:
        md.export(folder / "saved", folder / "checkpoint.pt")
    other = prepared(kind(how), layout)
    md.load(other, folder / "saved")
    whole, loaded = engine.full_state_dict(), other.full_state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    md.comm.barrier()
    state = torch.load(folder / "engine.pt", weights_only=True)
    again = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state.keys() == again.keys() == whole.keys() | ({"_extra_state"} if kind is Odd else set())
    for name, value in whole.items():
        for found in (state[name], again[name]):
            torch.testing.assert_close(found, value, rtol=0, atol=0)
    return state, other.model.told


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_hook_may_rename(cluster_of: Clusters, tmp_path: Path, layout: md.Layout) -> None:
    for state, _ in cluster_of(2).run(round_trip, Plain, "renames", layout, tmp_path):
        assert state.keys() == {"kernel", "linear.bias"}
        assert not state["kernel"].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_hook_may_not_copy(cluster_of: Clusters, tmp_path: Path, layout: md.Layout) -> None:
    """A load would write into the copy. Under ZeRO-3 there is nothing to copy."""

    def save() -> None:
        md.save(trained(Plain, "copies", layout), tmp_path / "saved")

    text = "linear.weight has no values now" if layout.zero == 3 else "kernel, which is no parameter and no"
    refused_on_ranks(cluster_of(2), Exception, text, save)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_extra_state_is_saved_as_torch_does(cluster_of: Clusters, tmp_path: Path, layout: md.Layout) -> None:
    for state, told in cluster_of(2).run(round_trip, Odd, "", layout, tmp_path):
        for found in (state["_extra_state"], told):
            assert found["calls"] == 7
            torch.testing.assert_close(found["table"], torch.ones(2))


def test_extra_state_that_no_file_can_hold_is_named(cluster_of: Clusters, tmp_path: Path) -> None:
    def save() -> None:
        md.save(trained(Odd, "unknown", LAYOUTS[0]), tmp_path / "saved")

    def export() -> None:
        md.export(trained(Odd, "", LAYOUTS[0]), tmp_path / "told.safetensors")

    said = "extra_state._extra_state is a object, which a checkpoint cannot hold"
    refused_on_ranks(cluster_of(2), TypeError, said, save)
    refused_on_ranks(cluster_of(2), TypeError, "_extra_state of the model is a dict; export to .pt", export)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_empty_parameters_and_expanded_buffers(
    cluster_of: Clusters, tmp_path: Path, layout: md.Layout
) -> None:
    for state, _ in cluster_of(2).run(round_trip, Plain, "empty", layout, tmp_path):
        assert state["none"].shape == (0, 3)
        torch.testing.assert_close(state["one"], torch.ones(4))
