"""Weights of others: safetensors files fill an engine in any layout, and exports go back to transformers."""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.checkpoint.pretrained import InFile
from minidist.model import GPT, MLP, GPTConfig
from tests.conftest import Clusters
from tests.helpers.contract import ADAMW
from tests.helpers.models import hugging_face

PRELOAD = ["transformers.models.llama.modeling_llama"]

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.1)


def transformer(name: str, seed: int | None = None) -> Any:
    """A small model of transformers in float64, whose forward returns its logits."""
    model = hugging_face(name, seed, exact=False).eval()
    sys.modules["transformers"].logging.disable_progress_bar()
    return with_logits(model)


def with_logits(model: Any) -> Any:
    model.register_forward_hook(lambda module, inputs, outputs: outputs.logits)
    return model


FAMILIES = ("Llama", "Llama with one table", "GPT-2", "BERT")
TOKENS = torch.arange(4 * 8).view(4, 8) * 7 % 13


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_families(layout: md.Layout, folder: Path) -> None:
    """Load each family from FOLDER/NAME, train for a step, and export it."""
    for name in FAMILIES:
        torch.manual_seed(9 + md.rank())  # other weights than those of the files, on each rank
        engine = md.prepare(transformer(name), SGD, layout, token_loss)
        md.load_pretrained(engine, folder / name)
        engine.step(*[TOKENS[engine.data_rank :: engine.data_ranks]] * 2)
        md.export(engine, folder / f"{name}, trained", max_file_bytes=9000)
        md.save(engine, folder / f"{name}, saved").wait()


@pytest.mark.parametrize("layout", ["dp=2,zero=3", pytest.param("dp=2,zero=2", marks=pytest.mark.deep)])
def test_a_transformer_goes_there_and_back(cluster_of: Clusters, tmp_path: Path, layout: str) -> None:
    pytest.importorskip("transformers", reason="its models make the files, and read them")
    expected = {}
    for seed, name in enumerate(FAMILIES):
        model = transformer(name, seed)
        model.save_pretrained(tmp_path / name)
        optimizer = SGD(model.parameters())
        token_loss(model(TOKENS), TOKENS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected[name] = type(model), model(TOKENS).detach()
    cluster_of(2).run(train_families, PARSE(layout), tmp_path)
    for name, source in [(name, source) for name in expected for source in ("trained", "exported")]:
        (kind, logits), folder = expected[name], tmp_path / f"{name}, {source}"
        if source == "exported":
            md.export(tmp_path / f"{name}, saved", folder, max_file_bytes=9000)
        assert len([*folder.glob("model-*.safetensors")]) > 1
        names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert ("lm_head.weight" in names) == (name == "Llama"), "a tied matrix is stored once"
        again = with_logits(kind.from_pretrained(folder))
        assert again.config.architectures == [kind.__name__]
        torch.testing.assert_close(again(TOKENS), logits, rtol=1e-10, atol=1e-10)


def gpt(seed: int, device: str | None = None) -> nn.Module:
    shape = GPTConfig(vocabulary=17, context=8, layers=2, heads=2, width=8)
    return GPT(shape, seed=seed, dtype=torch.float64, device=device)


def load_gpt(layout: md.Layout, source: Path, target: Path, device: str | None) -> dict[str, Tensor]:
    engine = md.prepare(gpt(1 + md.rank(), device), ADAMW, layout)
    assert md.load_pretrained(engine, source) == ([], [])
    md.export(engine, target, max_file_bytes=2000)
    md.export(engine, target.with_suffix(".safetensors"))
    md.export(engine, target.with_suffix(".pt"))
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        ("dp=2", None),
        ("dp=2,zero=2", None),
        ("dp=2,zero=3", "meta"),
        ("tp=2", None),
        ("dp=4,zero=3,shard=2", None),
        ("tp=2,pp=2", "meta"),
        ("dp=2,tp=2,zero=3", None),
        ("pp=4,zero=1", None),
    ],
)
def test_any_layout_reads_and_writes_the_same_files(
    cluster_of: Clusters, tmp_path: Path, layout: str, device: str | None
) -> None:
    expected = gpt(0).state_dict()
    save_file({name: value.clone() for name, value in expected.items()}, tmp_path / "start.safetensors")
    given = PARSE(layout), tmp_path / "start.safetensors", tmp_path / "out", device
    found = cluster_of(given[0].ranks).run(load_gpt, *given)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    divided = {name: value for file in files for name, value in load_file(file).items()}
    assert expected.keys() - divided.keys() == {"layers.3.output.weight"}, "a tied matrix is stored once"
    whole = load_file(tmp_path / "out.safetensors")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all([*weights] == [*expected] for weights in [*found, saved]), "in the model's order"
    with_tied = {**divided, "layers.3.output.weight": divided["layers.0.token.weight"]}
    for weights in [*found, with_tied, whole, saved]:
        torch.testing.assert_close(dict(weights), dict(expected), rtol=0, atol=0)


def load_masters(zero: int, path: Path) -> tuple[dict[str, Tensor], Path]:
    layout = md.Layout(dp=2, zero=zero, precision="bf16")
    engine = md.prepare(MLP((6, 5, 3), seed=md.rank()), ADAMW, layout)
    md.load_pretrained(engine, path)
    saved = md.save(engine, path.with_name("masters")).wait()
    return engine.full_state_dict(), saved


@pytest.mark.parametrize("zero", [0, 3])
def test_masters_keep_the_precision_of_the_files(cluster_of: Clusters, tmp_path: Path, zero: int) -> None:
    from minidist.checkpoint import state_dict

    expected = MLP((6, 5, 3), seed=7).state_dict()
    save_file({name: value.double() for name, value in expected.items()}, tmp_path / "model.safetensors")
    for weights, saved in cluster_of(2).run(load_masters, zero, tmp_path):
        torch.testing.assert_close(state_dict(saved), dict(expected), rtol=0, atol=0)
        for name, master in expected.items():
            assert torch.equal(weights[name], master.bfloat16()), name


LAYERS, WIDTH = 16, 1024
WHOLE = LAYERS * WIDTH * WIDTH * 4
"""Bytes: 4 MiB a layer."""


def peak_of_load(path: Path, releases: bool) -> int:
    """By how many bytes this rank's memory grows, at the most, while it loads."""
    from safetensors import safe_open

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = md.prepare(model, SGD, md.Layout(dp=2, zero=3))
    with pytest.MonkeyPatch.context() as patch:
        if not releases:
            file = safe_open(path, "pt")  # which stays open until all tensors are read

            def read(stored: InFile, offsets: Any, sizes: Any) -> Tensor:
                return file.get_slice(stored.name)[
                    [slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
                ]

            patch.setattr(InFile, "read", read)
        gc.collect()  # what is freed meanwhile would count against what grows
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        md.load_pretrained(engine, path)
        return resident("VmHWM") - before


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind + ":"))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_a_rank_never_holds_the_whole(cluster_of: Clusters, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}, path)
    assert max(cluster_of(2).run(peak_of_load, path, True)) < WHOLE / 4
    assert max(cluster_of(2).run(peak_of_load, path, False)) > WHOLE / 4, "the measure finds what is kept"


def one(model: nn.Module) -> md.Engine:
    return md.prepare(model, SGD)


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    engine, before = one(model), {n: v.clone() for n, v in model.state_dict().items()}
    path = tmp_path / "model.safetensors"
    other = {"a.0.weight": torch.ones(2, 3), "a.0.bias": torch.ones(2), "a.1.weight": torch.ones(2, 2)}
    save_file(other, path)
    with pytest.raises(md.CheckpointError, match=r"lacks 0\.weight.* and has, besides .*a\.0\.bias.*rename="):
        md.load_pretrained(engine, tmp_path)
    with pytest.raises(md.CheckpointError, match=r"lacks 1\.bias; prepare"):
        md.load_pretrained(engine, path, rename=lambda name: f"a.{name}")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = md.load_pretrained(engine, path, rename=lambda name: f"a.{name}", strict=False)
    assert found == (["1.bias"], [])
    assert torch.equal(model[0].weight, torch.ones(2, 3))
    save_file({n: torch.ones(2, 3) for n in model.state_dict()}, path)
    with pytest.raises(md.CheckpointError, match=r"0\.bias has \(2,\) and the files \(2, 3\)"):
        md.load_pretrained(engine, path)


class Tied(nn.Module):
    """Two names for one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


@pytest.mark.parametrize("names", [["a.weight"], ["b.weight"], ["a.weight", "b.weight"]])
def test_a_tied_matrix_may_have_any_of_its_names(tmp_path: Path, names: list[str]) -> None:
    engine = one(Tied())
    save_file({name: torch.full((2, 2), 3.0) for name in names}, tmp_path / "model.safetensors")
    md.load_pretrained(engine, tmp_path)
    assert torch.equal(engine.full_state_dict()["b.weight"], torch.full((2, 2), 3.0))


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    engine = one(Tied())
    with pytest.raises(md.CheckpointError, match="there is no file or folder"):
        md.load_pretrained(engine, tmp_path / "none")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(md.CheckpointError, match=r"neither model\.safetensors nor .* but pytorch_model\.bin"):
        md.load_pretrained(engine, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, path)
    for length in (os.path.getsize(path) - 1, 20, 3):
        os.truncate(path, length)
        with pytest.raises(md.DamagedCheckpoint, match="is not a whole safetensors file"):
            md.load_pretrained(engine, path)
    path.unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "x.safetensors"}}')
    with pytest.raises(md.DamagedCheckpoint, match=r"x\.safetensors cannot be read"):
        md.load_pretrained(engine, tmp_path)


def test_an_export_replaces_an_earlier_model_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    large, small = one(MLP((6, 5, 3))), one(Tied())
    md.export(large, tmp_path, max_file_bytes=100)
    assert len([*tmp_path.iterdir()]) > 3
    checkpoint = md.save(small, tmp_path.with_name("checkpoint")).wait()
    for source in (small, checkpoint):
        md.export(source, tmp_path)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "tokenizer.json"]
        assert [*load_file(tmp_path / "model.safetensors")] == ["a.weight"]
    md.export(large, tmp_path, max_file_bytes=100)
    assert not (tmp_path / "model.safetensors").exists()
    assert md.load_pretrained(large, tmp_path) == ([], [])


def test_a_training_is_saved_whatever_transformers_says_of_its_texts(tmp_path: Path) -> None:
    """`save_pretrained` refuses a temperature without sampling, which published models have had."""
    pytest.importorskip("transformers", reason="the model is one of transformers")
    model = transformer("Llama")
    model.generation_config.temperature = 0.5
    md.save(md.prepare(model, SGD), tmp_path / "run", step=1)
    md.export(tmp_path / "run" / "step-00000001", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["temperature"] == 0.5
