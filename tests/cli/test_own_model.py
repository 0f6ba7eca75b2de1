"""A model of your own on the command line: each command takes it, and says what is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run

MODULE = """
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x):
        return torch.relu(x + self.norm(self.map(x)))


def resnet():
    blocks = nn.Sequential(Residual(), Residual())
    return nn.Sequential(nn.Conv2d(3, 4, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def images():
    return torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5


def llama():
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(shape)
    model.register_forward_hook(lambda module, inputs, outputs: outputs.logits)
    return model


def tokens():
    tokens = torch.randint(32, (40, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def squares(outputs, targets):
    return (outputs - targets[:, None]).square().mean()


def number():
    return 3
"""
RESNET = ("--model", "mine:resnet", "--data", "mine:images")
LLAMA = ("--model", "mine:llama", "--data", "mine:tokens")
deep = pytest.mark.deep


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with mine.py, which is the working directory."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine", None)


def found(run: Run, *words: str) -> Any:
    if "mine:llama" in words:
        pytest.importorskip("transformers", reason="the Llama is its")
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("own", [RESNET, LLAMA], ids=["resnet", "llama"])
def test_plan_and_dryrun_take_it(run: Run, own: tuple[str, ...]) -> None:
    plan = found(run, "plan", *own, "--ranks", "2", "--profile", "t4")
    assert plan["answer"] == "dp=2,precision=fp16"
    assert {each["layout"].split(",")[0] for each in plan["fitting"]} == {"dp=2"}
    assert plan["batch"] == [64, 0]
    dry = found(run, "dryrun", *own, "--layout", "dp=8,zero=2", "--rank", "kinds", "--batch", "20")
    assert [each["alike"] for each in dry["runs"]] == [4, 4]  # some have 3 rows, others 2
    assert dry["time"]["seconds"] > 0
    dry = found(run, "dryrun", *own, "--layout", "dp=2,pp=2", "--rank", "kinds")
    assert [each["alike"] for each in dry["runs"]] == [2, 2]  # the stages
    assert all(each["by_axis"]["pp"] > 0 for each in dry["runs"])
    assert dry["time"] is None


@pytest.mark.parametrize("own", [RESNET, pytest.param(LLAMA, marks=deep)], ids=["resnet", "llama"])
def test_train_takes_it(run: Run, own: tuple[str, ...], tmp_path: Path) -> None:
    words = ("train", *own, "--ranks", "2", "--batch", "8", "--save", str(tmp_path / "run"))
    first = found(run, *words, "--steps", "3")
    again = found(run, *words, "--steps", "6")
    assert again["losses"][:3] == first["losses"]
    assert len({*again["losses"]}) == 6
    assert 0 <= again["test_accuracy"] <= 1


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "pp=2"])
@pytest.mark.parametrize("own", [RESNET, pytest.param(LLAMA, marks=deep)], ids=["resnet", "llama"])
def test_compare_takes_it(run: Run, own: tuple[str, ...], layout: str) -> None:
    assert found(run, "compare", *own, "--a", "dp=1", "--b", layout, "--dtype", "float64")["agree"]


@pytest.mark.parametrize("own", [RESNET, pytest.param(LLAMA, marks=deep)], ids=["resnet", "llama"])
def test_trace_takes_it(run: Run, own: tuple[str, ...]) -> None:
    traced = found(run, "trace", *own, "--layout", "dp=2", "--batch", "8", "--steps", "1")
    assert [each["calls"] for each in traced["ranks"]] == [1, 1]


def test_a_loss_of_your_own(run: Run) -> None:
    trained = found(run, "train", *RESNET, "--loss", "mine:squares", "--steps", "2", "--batch", "8")
    assert trained["losses"][0] > 4  # the mean of targets from 0 to 4, squared, is 6
    assert trained["test_accuracy"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "--model", "mine:resnet"), "--data is missing; give a function that returns"),
        (("plan", "--model", "mine:resnet", "--data", "digits"), "--data is 'digits'; give a function"),
        (("plan", "--model", "theirs:resnet", "--data", "mine:images"), "there is no module theirs"),
        (("plan", "--model", "mine:vgg", "--data", "mine:images"), "mine has no function vgg"),
        (("plan", "--model", "mine:", "--data", "mine:images"), "give a module and a function in it"),
        (("plan", "--model", "mine:number", "--data", "mine:images"), "let it return a torch.nn.Module"),
        (("plan", "--model", "mine:resnet", "--data", "mine:number"), "let its function return two tensors"),
        (("plan", "--model", "bert-base", "--data", "mine:images"), "--model is bert-base, which needs none"),
        (("plan", *RESNET, "--tokens", "4"), "give rows, at least 1: its data says their shape"),
        (("plan", *RESNET, "--measure"), "leave it out, and time the answer with minidist train"),
        (("dryrun", *RESNET, "--layout", "pp=9"), "9 parts, and the model has 2 layers"),
        (("train", "--model", "mine:resnet"), "--data is missing"),
        (("train", *RESNET, "--loss", "mine:cubes"), "mine has no function cubes"),
        (("compare", "--model", "mine:resnet", "--a", "dp=1", "--b", "dp=2"), "--data is missing"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, words: tuple[str, ...], told: str) -> None:
    more = ("--memory", "1GB") if words[0] == "plan" and "--measure" not in words else ()
    code, out, err = run(*words, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
