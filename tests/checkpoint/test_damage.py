"""Damaged, hostile, foreign and half-written checkpoints: the error names them, and nothing is executed."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import signal
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import minidist as md
from minidist.checkpoint import checkpoints, folders, index, saving, state, state_dict
from minidist.model import MLP, Sampler
from minidist.parallel.contract.tensor_boxes import TensorBox
from minidist.parallel.sharding import state_by_name
from tests.conftest import Clusters
from tests.helpers import contract

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(8) % 3


def engine(model: nn.Module | None = None, optimizer: Any = contract.ADAMW) -> Any:
    return md.prepare(model or MLP((6, 5, 3), seed=3), optimizer, md.Layout(dp=md.size()))


def trained(steps: int = 1) -> Any:
    made = engine()
    for _ in range(steps):
        made.step(ROWS, TARGETS)
    return made


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two checkpoints, after steps 1 and 2."""
    folder, made = tmp_path_factory.mktemp("saved"), engine()
    for step in (1, 2):
        made.step(ROWS, TARGETS)
        md.save(made, folder, step=step, extra={"step": step})
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved`, to damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def files(path: Path) -> list[Path]:
    found = sorted(path.iterdir())
    assert [file.name for file in found] == ["index.json", "rank-00000.bin"]
    return found


def truncated(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def emptied(data: bytes, draw: random.Random) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [truncated, flipped, emptied])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_file_is_named_wherever_it_is_hit(folder: Path, damage: Any, number: int) -> None:
    newest = checkpoints(folder)[0]
    file, made = files(newest)[number], trained(0)
    before, whole, draw = made.full_state_dict(), file.read_bytes(), random.Random(number)
    for _ in range(1 if damage is emptied else 60):
        file.write_bytes(damage(whole, draw))
        with pytest.raises(md.DamagedCheckpoint, match=f"{file} is damaged"):
            md.load(made, newest)
    assert same(made.full_state_dict(), before)
    with pytest.warns(UserWarning, match=f"passed over a checkpoint: {file} is damaged"):
        loaded = md.load(made, folder, latest=True)
    assert (loaded.step, loaded.extra) == (1, {"step": 1})
    assert same(made.full_state_dict(), state_dict(folder / "step-00000001"))
    file.write_bytes(whole)
    assert md.load(made, folder, latest=True).step == 2


@pytest.mark.filterwarnings("ignore:passed over a checkpoint")
def test_every_bit_of_the_header_is_guarded(folder: Path) -> None:
    newest = checkpoints(folder)[0]
    file, made = files(newest)[0], trained(0)
    whole = file.read_bytes()
    head = len(index.HEAD % (index.VERSION, 0))
    for place in range(8 * head):
        at, bit = divmod(place, 8)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(md.DamagedCheckpoint, match=r"index\.json is damaged"):
            index.read_index(newest)
        if whole[at : at + 1].isdigit():
            assert md.load(made, folder, latest=True).step == 1


@pytest.mark.parametrize("name", ["index.json", "rank-00000.bin"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    newest = checkpoints(folder)[0]
    (newest / name).unlink()
    with pytest.raises(md.DamagedCheckpoint, match=name):
        md.load(trained(0), newest)
    with pytest.warns(UserWarning, match=name):
        assert md.load(trained(0), folder, latest=True).step == 1


@pytest.mark.parametrize("lost", [["index.json"], ["rank-00000.bin"], ["index.json", "rank-00000.bin"]])
def test_a_damaged_checkpoint_is_saved_again(folder: Path, lost: list[str]) -> None:
    made = trained(0)
    for name in lost:
        (folder / "step-00000002" / name).unlink()
    with pytest.warns(UserWarning, match="passed over a checkpoint"):
        assert md.load(made, folder, latest=True).step == 1
    made.step(ROWS, TARGETS)
    md.save(made, folder, step=2)
    assert md.load(made, folder, latest=True).step == 2


def test_what_is_not_ours_alone_is_not_replaced(folder: Path) -> None:
    (folder / "step-00000002" / "index.json").unlink()
    (folder / "step-00000002" / "notes.txt").write_text("years")
    os.rename(folder / "step-00000001", folder / "one")
    (folder / "one" / "index.json").unlink()  # of no name that is ours
    for path, step in ((folder, 2), (folder / "one", None)):
        with pytest.raises(md.CheckpointError, match="exists and is no checkpoint"):
            md.save(trained(0), path, step=step)


@pytest.mark.filterwarnings("ignore:passed over a checkpoint")
def test_where_none_is_whole_all_are_named(folder: Path, tmp_path: Path) -> None:
    for path in checkpoints(folder):
        files(path)[1].write_bytes(b"")
    with pytest.raises(md.DamagedCheckpoint, match=r"no checkpoint in .* is whole: .*002.*; .*001"):
        md.load(trained(0), folder, latest=True)
    for empty in (tmp_path, tmp_path / "none"):
        with pytest.raises(md.CheckpointError, match="there is no checkpoint in"):
            md.load(trained(0), empty, latest=True)
    with pytest.raises(md.CheckpointError, match="there is no checkpoint at"):
        md.load(trained(0), tmp_path / "none")


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_file_is_executed(folder: Path, tmp_path: Path) -> None:
    mark, newest = tmp_path / "executed", checkpoints(folder)[0]
    bomb, ours = pickle.dumps(Bomb(mark)), files(newest)
    for name in (".metadata", "__0_0.distcp"):  # what torch.distributed.checkpoint calls its own
        (newest / name).write_bytes(bomb)
    for file in ours:
        whole = file.read_bytes()
        for data in (bomb, whole + bomb, bomb + whole):
            file.write_bytes(data)
            for reading in (lambda: md.load(trained(0), newest), lambda: state_dict(newest)):
                with pytest.raises(md.DamagedCheckpoint, match="is damaged"):
                    reading()
        file.write_bytes(whole)
    # An attacker who knows the format: fitting checksums, and a bomb wherever there can be text.
    data_file, facts = newest / "rank-00000.bin", index.read_index(newest)
    data = bomb + data_file.read_bytes()[len(bomb) :]
    data_file.write_bytes(data)
    hostile: dict[str, Any] = {"$pickle": bomb.hex()}
    index.write_index(
        newest,
        {data_file.name: (len(data), zlib.crc32(data))},
        facts.tensors,
        {**facts.facts, "extra": bomb.hex()},
    )
    assert md.load(engine(), newest).extra == bomb.hex()
    index.write_index(newest, facts.files, facts.tensors, {**facts.facts, "extra": hostile})
    data_file.write_bytes((folder / "step-00000002" / data_file.name).read_bytes())
    with pytest.raises(md.DamagedCheckpoint):
        md.load(engine(), newest)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # it was one


@pytest.mark.parametrize("outside", ["../other", "/etc/passwd", ".."])
def test_a_file_outside_of_the_checkpoint_is_not_read(folder: Path, outside: str) -> None:
    newest = checkpoints(folder)[0]
    found = index.read_index(newest)
    index.write_index(newest, {**found.files, outside: (0, 0)}, found.tensors, found.facts)
    with pytest.raises(md.DamagedCheckpoint, match=r"index\.json is damaged"):
        md.load(trained(0), newest)


def test_another_version_is_said(folder: Path) -> None:
    file = files(checkpoints(folder)[0])[0]
    body = file.read_bytes()[len(index.HEAD % (index.VERSION, 0)) :]
    file.write_bytes(index.HEAD % (2, zlib.crc32(body, zlib.crc32(b"2"))) + body)
    with pytest.raises(md.CheckpointError, match="has version 2 of the checkpoint format"):
        md.load(trained(0), file.parent)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "optimizer", "text"),
    [
        (
            MLP((6, 4, 3)),
            contract.ADAMW,
            r"another model: of .*weight it has shape \(5, 6\).* shape \(4, 6\)",
        ),
        (MLP((6, 5, 5, 3)), contract.ADAMW, "another model: of .* it has .*no such tensor|has shape"),
        (Renamed(), contract.ADAMW, "another model: of .* it has shape .*has no such tensor"),
        (
            None,
            torch.optim.SGD,
            "of another optimizer: it was saved with AdamW, and is loaded with SGD; give",
        ),
    ],
)
def test_another_model_is_refused_and_nothing_changed(
    saved: Path, model: Any, optimizer: Any, text: str
) -> None:
    made = engine(model, optimizer if optimizer is contract.ADAMW else lambda p: optimizer(p, lr=0.1))
    before, settings = made.full_state_dict(), state_by_name.settings(made.strategy)
    with pytest.raises(md.CheckpointError, match=text):
        md.load(made, saved / "step-00000002")
    assert same(made.full_state_dict(), before)
    assert state_by_name.settings(made.strategy) == settings


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_another_optimizer_is_refused_in_every_layout(
    saved: Path, cluster_of: Clusters, zero: int, precision: str
) -> None:
    def load() -> None:
        layout = md.Layout(dp=2, zero=zero, precision=precision)
        with pytest.raises(
            md.CheckpointError, match="it was saved with AdamW, and is loaded with Adam; give"
        ):
            md.load(md.prepare(MLP((6, 5, 3)), partial(torch.optim.Adam, lr=0.1), layout), saved, latest=True)
        md.load(md.prepare(MLP((6, 5, 3)), contract.ADAMW, layout), saved, latest=True)

    cluster_of(2).run(load)


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    made = trained()
    step = partial(torch.optim.lr_scheduler.StepLR, made.optimizer)
    md.save(made, tmp_path / "one", scheduler=step(3))
    with pytest.raises(md.CheckpointError, match="it was saved with StepLR, and is loaded with CosineAnneal"):
        md.load(
            made, tmp_path / "one", scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, 9)
        )
    other = step(4)
    md.load(made, tmp_path / "one", scheduler=other)
    assert other.step_size == 3
    md.load(made, tmp_path / "one")  # without one, as before


def test_a_checkpoint_that_names_no_classes_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    """Older checkpoints are like that. The options of another optimizer still give it away."""
    made = trained()
    with monkeypatch.context() as patch:
        patch.setattr(state, "classes", lambda *_: None)
        md.save(made, tmp_path / "one")
    assert md.load(made, tmp_path / "one").path == tmp_path / "one"
    with pytest.raises(md.CheckpointError, match="of another optimizer: it has 'amsgrad' in its group 0"):
        md.load(engine(None, partial(torch.optim.SGD, lr=0.1)), tmp_path / "one")


def test_options_of_the_optimizer_become_the_saved_ones(tmp_path: Path) -> None:
    made = trained()
    md.save(made, tmp_path / "one")
    other = engine(None, partial(torch.optim.AdamW, lr=0.5))
    md.load(other, tmp_path / "one")
    assert other.optimizer.param_groups[0]["lr"] == made.optimizer.param_groups[0]["lr"] != 0.5


def test_another_order_of_rows_is_refused(tmp_path: Path) -> None:
    made = trained()
    md.save(made, tmp_path / "one", sampler=Sampler(100, 10, seed=1))
    md.load(made, tmp_path / "one", sampler=Sampler(100, 10, seed=1))
    with pytest.raises(ValueError, match=r"the sampler has seed=2 and that of .*one had 1"):
        md.load(made, tmp_path / "one", sampler=Sampler(100, 10, seed=2))
    md.save(made, tmp_path / "none")
    with pytest.raises(ValueError, match="none was saved without a sampler; load it without"):
        md.load(made, tmp_path / "none", sampler=Sampler(100, 10, seed=1))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"step": -1}, ValueError, "step is -1"),
        ({"step": 1, "keep": 0}, ValueError, "keep is 0"),
        ({"keep": 2}, ValueError, "keep=2 needs step="),
        (
            {"extra": {"a": [object()]}},
            TypeError,
            r"extra.a\[0\] is a object, which a checkpoint cannot hold",
        ),
        (
            {"extra": {"a": torch.ones(1, dtype=torch.complex64)}},
            TypeError,
            r"extra.a is a tensor of torch.complex64, which a checkpoint cannot hold",
        ),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_wrong_arguments(tmp_path: Path, options: Any, error: Any, text: str, asynchronous: bool) -> None:
    with pytest.raises(error, match=text):
        md.save(trained(), tmp_path / "one", asynchronous=asynchronous, **options).wait()
    assert list(tmp_path.iterdir()) == []


def test_a_save_to_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    made, cur = trained(), tmp_path / "cur"
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    cur.symlink_to(tmp_path / "disk" / "one")
    runs = tmp_path / "runs"
    runs.symlink_to(tmp_path / "disk" / "runs")
    for turn in range(3):
        md.save(made, cur, extra=turn)
        assert md.load(made, cur).extra == turn
        md.save(made, runs, step=turn, keep=2, extra=turn)
        assert md.load(made, runs, latest=True).extra == turn
    assert cur.is_symlink()
    assert runs.is_symlink()
    assert sorted(os.listdir(tmp_path / "disk")) == ["one", "runs"]
    assert sorted(os.listdir(tmp_path)) == ["cur", "disk", "runs"]


def test_two_saves_at_a_time_to_one_path_are_refused(tmp_path: Path) -> None:
    """What another program writes in the folder is not removed as a leftover."""
    made = trained()
    theirs = tmp_path / "step-00000001.writing"
    descriptor = folders.begin_writing(theirs)
    for _ in range(2):
        with pytest.raises(md.CheckpointError, match=r"another save writes .*step-00000001 now; give each"):
            md.save(made, tmp_path, step=1)
    md.save(made, tmp_path, step=2, keep=1)
    assert theirs.is_dir()
    folders.end_writing(descriptor)  # as if that program had been killed
    md.save(made, tmp_path, step=1, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_the_root_of_all_files_is_no_place_for_a_checkpoint() -> None:
    with pytest.raises(ValueError, match="path is /, the root of all files; give the name of a directory"):
        md.save(trained(), "/")


def test_a_directory_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(md.CheckpointError, match="exists and is no checkpoint"):
            md.save(trained(), path)
    assert (tmp_path / "thesis.tex").read_text() == "years"
    assert not list(tmp_path.parent.glob("*.writing"))


def test_the_newest_are_kept_and_what_was_cut_short_is_cleared(tmp_path: Path) -> None:
    made = trained()
    (tmp_path / "step-00000001.writing").mkdir()
    for step in range(1, 6):
        md.save(made, tmp_path, step=step, keep=3)
        assert len(checkpoints(tmp_path)) == min(step, 3)
    md.save(made, tmp_path, step=5, keep=3)  # again, over itself
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-0000000{n}" for n in (3, 4, 5)]
    (tmp_path / "weights.writing").mkdir()  # another's
    for step in (1, 2):  # back at an earlier step, which abandons the later ones
        md.save(made, tmp_path, step=step, keep=3, extra={"again": step})
        assert md.load(made, tmp_path, latest=True).extra == {"again": step}
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["2", "1", "5"]
    md.save(made, tmp_path, step=6, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "weights.writing"]


@pytest.mark.filterwarnings("ignore:passed over a checkpoint")
def test_damaged_ones_take_no_place_of_whole_ones(tmp_path: Path) -> None:
    made = trained()
    for step in range(1, 5):
        md.save(made, tmp_path, step=step)
    (tmp_path / "step-00000004" / "index.json").unlink()
    (tmp_path / "step-00000003" / "rank-00000.bin").write_bytes(b"")
    md.save(made, tmp_path, step=5, keep=3)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["5", "4", "3", "2", "1"]
    md.save(made, tmp_path, step=6, keep=2)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["6", "5"]


@pytest.mark.parametrize("step", [None, 7])
def test_a_save_killed_where_neither_has_the_name_loses_nothing(
    tmp_path: Path, monkeypatch: Any, step: int | None
) -> None:
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    made, path, rename = trained(), tmp_path / "one", os.rename
    target = path if step is None else path / folders.step_name(step)
    md.save(made, path, step=step, extra="first")

    def killed(source: Any, name: Any) -> None:
        if Path(name) == target:
            raise OSError("killed")
        rename(source, name)

    for extra in ("first", "second"):  # the second save finds what the first has left
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", killed)
            with pytest.raises(md.CheckpointError, match="killed"):
                md.save(made, path, step=step, extra="second")
        assert not target.exists()
        assert md.load(made, path, latest=step is not None).extra == extra
        if step is not None:
            assert [each.name for each in checkpoints(path)] == [target.name + ".old.writing"]
            md.save(made, path, step=1, keep=2)
            assert md.load(made, path / target.name).extra == extra
        md.save(made, path, step=step, extra="second", keep=step and 1)
        assert [each.name for each in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_replaces_what_was_there(tmp_path: Path, monkeypatch: Any, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    made, path = trained(), tmp_path / "one"
    for _ in range(2):
        made.step(ROWS, TARGETS)
        md.save(made, path)
        assert same(made.full_state_dict(), state_dict(path))
        assert [each.name for each in tmp_path.iterdir()] == ["one"]


# Saves that fail, on two ranks of which one is at fault.


def step_on_own_rows(made: Any) -> None:
    """A step in which the ranks share the rows."""
    made.step(contract.own_rows(made, (ROWS, TARGETS)))


def failing_save(folder: Path, fault: str, asynchronous: bool) -> str:
    """Save step 1 and then, with a fault on one rank, step 2. Returns the error's message."""
    made = engine()
    step_on_own_rows(made)
    md.save(made, folder, step=1)
    with pytest.MonkeyPatch.context() as patch:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        target = folder
        if fault == "read-only":
            target = Path("/proc")
        elif md.rank() == 1:
            if fault == "full":  # like a full disk: a file cannot grow
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            elif fault == "missing":
                state_boxes = state_by_name.state_boxes
                patch.setattr(state_by_name, "state_boxes", lambda shared: list(moved(state_boxes(shared))))
            elif fault == "forgotten":
                write = saving.write_boxes

                def forget(path: Path, boxes: Any) -> Any:
                    boxes.popitem()
                    return write(path, boxes)

                patch.setattr(saving, "write_boxes", forget)
            elif fault == "killed":
                patch.setattr(saving, "write_boxes", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        elif fault == "killed before the rename":
            patch.setattr(folders, "put_in_place", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            md.save(made, target, step=2, keep=1, asynchronous=asynchronous).wait()
        except md.CheckpointError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    md.save(made, folder, step=3)  # the ranks still agree on what they do
    md.load(made, folder, latest=True)
    return said


def moved(boxes: Iterator[TensorBox]) -> Iterator[TensorBox]:
    """The boxes, with a wrong offset for the first."""
    first = next(boxes)
    yield TensorBox(first.name, (first.shape[0] + 1, *first.shape[1:]), (1, *first.offsets[1:]), first.tensor)
    yield from boxes


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("full", "rank 1 could not write .*step-00000002: File too large"),
        ("read-only", "rank 0 could not write /proc/step-00000002"),
        ("missing", "the boxes of .* are of tensors of different shapes|do not make up the state"),
        ("forgotten", "no rank wrote"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all(
    cluster_of: Clusters, tmp_path: Path, fault: str, text: str, asynchronous: bool
) -> None:
    said = cluster_of(2).run(failing_save, tmp_path, fault, asynchronous)
    assert said[0] == said[1]
    with pytest.raises(md.CheckpointError, match=text):
        raise md.CheckpointError(said[0])
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000001"]
    assert not list(tmp_path.glob("*.writing"))


def failing_saves(folder: Path, zero: int) -> list[str]:
    """Saves that rank 0 cannot begin or clean up, before and after the first step. Returns the messages."""
    made = md.prepare(MLP((6, 5, 3), seed=3), contract.ADAMW, md.Layout(dp=md.size(), zero=zero))
    said = []
    for steps in range(2):
        for target in (Path("/proc"), folder / "file" / "under", folder):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(folders, "seems_whole", lambda _: 1 / 0)
                for asynchronous in (False, True):
                    with pytest.raises(md.CheckpointError) as error:
                        md.save(made, target, step=steps, keep=1, asynchronous=asynchronous).wait()
                    said.append(str(error.value))
        md.save(made, folder, step=steps)
        step_on_own_rows(made)
    return said


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_save_that_cannot_begin_fails_on_all_before_the_first_step_too(
    cluster_of: Clusters, tmp_path: Path, zero: int
) -> None:
    (tmp_path / "file").write_text("no directory")
    one, other = cluster_of(2).run(failing_saves, tmp_path, zero)
    assert one == other
    assert all(text.startswith("rank 0 could not write ") for text in one)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001", "step-00000000"]


@pytest.mark.parametrize("fault", ["killed", "killed before the rename"])
def test_a_rank_killed_in_a_save_leaves_the_previous_whole(
    cluster_of: Clusters, tmp_path: Path, fault: str
) -> None:
    with pytest.raises(md.RankError, match=r"rank \d was killed|SIGKILL"):
        cluster_of(2).run(failing_save, tmp_path, fault, False)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    assert (tmp_path / "step-00000002.writing").is_dir()
    made = trained()
    assert md.load(made, tmp_path, latest=True).step == 1
    md.save(made, tmp_path, step=2, keep=2)
    assert not list(tmp_path.glob("*.writing"))


def test_a_strategy_that_forgets_a_box_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    made = trained()
    boxes = [*state_by_name.state_boxes(made.strategy)]
    half = boxes[0].tensor[:2]
    short = [TensorBox(boxes[0].name, boxes[0].shape, boxes[0].offsets, half), *boxes[1:]]
    monkeypatch.setattr(state_by_name, "state_boxes", lambda _: iter(short))
    with pytest.raises(md.CheckpointError, match=r"hold 12 elements, and the tensor of shape .5, 6. has 30"):
        md.save(made, tmp_path / "one")


# Asynchronous saves.


def test_training_goes_on_while_a_thread_writes(cluster_of: Clusters, tmp_path: Path) -> None:
    def run() -> None:
        made = engine()
        step_on_own_rows(made)
        before = made.full_state_dict()
        saving = md.save(made, tmp_path / "one", asynchronous=True)
        for _ in range(5):
            step_on_own_rows(made)
        second = md.save(made, tmp_path / "two", asynchronous=True)
        assert saving.done  # the second waited for the first
        assert second.wait() == second.wait() == tmp_path / "two"
        assert same(state_dict(tmp_path / "one"), before)
        assert same(state_dict(tmp_path / "two"), made.full_state_dict())

    for ranks in (1, 2):
        cluster_of(ranks).run(run)


def test_an_error_in_the_thread_surfaces_at_the_next_save(tmp_path: Path, monkeypatch: Any) -> None:
    made = trained()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def fail() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_all", full)
            under_way = md.save(made, tmp_path / "one", asynchronous=True)
            while not under_way.done:
                pass
        return under_way

    under_way = fail()
    with pytest.raises(md.CheckpointError, match=r"rank 0 could not write .*one: No space left on device"):
        md.save(made, tmp_path / "two")
    md.save(made, tmp_path / "two")
    under_way.wait()  # said once
    under_way = fail()
    with pytest.warns(UserWarning, match=r"an earlier save failed: rank 0 could not write .*one: No space"):
        assert md.load(made, tmp_path / "two").path == tmp_path / "two"
    md.load(made, tmp_path / "two")
    under_way.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


# The weights alone.


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.half = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("roots", torch.tensor([1j, -1j], dtype=torch.complex64))
        for dtype in (torch.uint16, torch.uint32, torch.uint64):
            self.register_buffer(str(dtype)[6:], torch.tensor([0, torch.iinfo(dtype).max], dtype=dtype))


def test_exports_are_read_by_others(tmp_path: Path) -> None:
    made = engine(Mixed())
    path = md.save(made, tmp_path / "one").wait()
    weights = made.full_state_dict()
    for source in (made, path):
        assert same(load_file(md.export(source, tmp_path / "model.safetensors")), weights)
        assert same(torch.load(md.export(source, tmp_path / "model.pt"), weights_only=True), weights)
    empty = Mixed()
    for each in empty.state_dict().values():
        each.zero_()
    other = engine(empty)
    md.load_pretrained(other, tmp_path / "model.safetensors")
    assert same(other.full_state_dict(), weights)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pt", "model.safetensors", "one"]
    with pytest.raises(ValueError, match=r"ends in \.safetensors, \.pt or \.pth"):
        md.export(made, tmp_path / "model.bin")
    foreign = nn.Linear(1, 1, bias=False)
    foreign.register_buffer("roots", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"cannot hold these weights, of torch\.complex128"):
        md.export(engine(foreign), tmp_path / "model.safetensors")
    with pytest.raises(md.CheckpointError, match="rank 0 could not write"):
        md.export(made, tmp_path / "none" / "model.pt")


def test_an_export_names_its_own_arguments(tmp_path: Path) -> None:
    made = engine(nn.Linear(2, 2))
    md.save(made, tmp_path / "run", step=3).wait()
    (newest,) = (tmp_path / "run").iterdir()
    with pytest.raises(
        md.DamagedCheckpoint, match=f"give the directory of one checkpoint, such as {newest}$"
    ):
        md.export(tmp_path / "run", tmp_path / "model.pt")
    with pytest.raises(TypeError, match=r"^source is a Linear; give an engine that md\.prepare returned, or"):
        md.export(made.model, tmp_path / "model.pt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^path is a int; give a file name"):
        md.export(made, 3)  # type: ignore[arg-type]
