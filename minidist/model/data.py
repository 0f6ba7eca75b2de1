"""Data that every machine has: handwritten digits, and the source of Python's own standard library.

Nothing is downloaded. A hash, not a shuffle, splits each data set, so the split is the same on every machine,
in every run and with every version of every library. `dataset(name)` gives either in one form, whose
`train[indices]` and `test[indices]` are inputs and targets.

Source of the digits: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, 1998 (its test part:
1797 images).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minidist._arguments import check_whole
from minidist._names import unknown
from minidist.model.loss import IGNORED
from minidist.model.seeding import generator, stable_hash

DATASETS = ("digits", "bytes")
HIDDEN = 0.15
"""The share of a row's tokens that `masked` hides."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of inputs and targets, taken by a sampler's index tensor: `inputs, targets = rows[indices]`.

    Integers keep their narrow dtype until rows are taken as int64: a corpus stays one byte a token.
    """

    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N, ...)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs have {len(self.targets)} targets; give one for each")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        return _widened(self.inputs[index]), _widened(self.targets[index])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows to train on, and rows held out."""

    name: str
    train: Rows
    test: Rows
    classes: int  # targets lie from 0 to classes - 1

    def fingerprint(self) -> str:
        """Return a hash of all values, to compare machines: another Python has another standard library."""
        digest = hashlib.sha256()
        for rows in (self.train, self.test):
            for values in (rows.inputs, rows.targets):
                digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
                digest.update(values.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes, split by file. Files are joined in the order of their paths, with nothing in between."""

    train: Tensor  # (bytes,) uint8
    validation: Tensor  # (bytes,) uint8
    train_files: tuple[str, ...]  # relative paths, with forward slashes
    validation_files: tuple[str, ...]


def digits(limit: int | None = None) -> Dataset:
    """Return images of 8 x 8 pixels: at most `limit` of 1437 rows to train on, and of 360 held out.

    Inputs are (N, 64) float32 from 0 to 1 in sixteenths, targets (N,) int64 from 0 to 9. The rows whose
    numbers have the lowest hashes are held out. Both parts contain the handwriting of the same people, so
    accuracy holds for this data set and not for new writers. Raises ModuleNotFoundError without scikit-learn,
    whose folder contains the images.
    """
    _check_limit(limit)
    library = importlib.util.find_spec("sklearn")
    if library is None or library.origin is None:
        raise ModuleNotFoundError(
            'the digits come with scikit-learn, which is not installed: pip install "minidist[bench]", '
            'or train on "bytes", which needs nothing',
            name="sklearn",
        )
    # Not with its load_digits: importing that takes a second of every rank.
    images = np.loadtxt(Path(library.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    inputs = torch.from_numpy(images[:, :-1]).to(torch.float32) / 16  # sixteenths: exact in float32
    targets = torch.from_numpy(images[:, -1]).to(torch.int64)
    by_hash = sorted(range(len(targets)), key=lambda row: stable_hash("digits", row))
    held_out = len(targets) // 5 + 1
    train, test = (
        Rows(inputs[chosen], targets[chosen])
        for chosen in (torch.tensor(by_hash[held_out:][:limit]), torch.tensor(by_hash[:held_out][:limit]))
    )
    return Dataset("digits", train, test, classes=10)


def stdlib_bytes(root: str | os.PathLike[str] | None = None, *, limit: int | None = None) -> Corpus:
    """Return the running Python's standard library, its *.py files, as bytes: 12 MB with Python 3.11.

    A file is held out for validation if the hash of its relative path is a multiple of ten, so a new file
    moves no other. Installed packages, tests, and files that differ between machines with the same Python are
    left out; unreadable files are skipped. root: another folder to read. limit: most bytes of each half.
    Raises FileNotFoundError if a half has no text, as in a Python that keeps its library in an archive.
    """
    _check_limit(limit)
    folder = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    texts: tuple[list[bytes], list[bytes]] = [], []  # train, validation
    names: tuple[list[str], list[str]] = [], []
    sizes = [0, 0]
    for name in sorted(_python_files(folder)):
        half = 1 if stable_hash("bytes", name) % 10 == 0 else 0
        if limit is not None and sizes[half] >= limit:
            continue
        try:
            text = (folder / name).read_bytes()
        except OSError:
            continue
        texts[half].append(text)
        names[half].append(name)
        sizes[half] += len(text)
    if 0 in sizes:
        raise FileNotFoundError(
            f"{folder} holds {sizes[0]} bytes of readable Python source to train on and {sizes[1]} to "
            "validate on, but both are needed; give stdlib_bytes(root=...) a folder with more *.py files, or "
            "use a Python whose library is not in an archive"
        )
    train, validation = (torch.frombuffer(bytearray(b"".join(t)), dtype=torch.uint8)[:limit] for t in texts)
    return Corpus(train, validation, tuple(names[0]), tuple(names[1]))


def windows(corpus: Tensor, length: int, *, limit: int | None = None) -> Rows:
    """Return at most `limit` rows of `length` tokens, one after the other, from a corpus (bytes,).

    Inputs are (N, T); targets (N, T) are the same shifted by one token. Both are views: nothing is copied
    until rows are taken. The tail that does not fill a row is left out. Raises ValueError if the corpus is
    too short for one row.
    """
    _check_limit(limit)
    if corpus.dim() != 1 or corpus.is_floating_point():
        raise TypeError(f"corpus is {corpus.dtype} of shape {tuple(corpus.shape)}; give one row of integers")
    check_whole("length", length, 1)
    if len(corpus) <= length:
        raise ValueError(
            f"the corpus has {len(corpus)} tokens, too few for length {length} and one target more; "
            "give a longer corpus or a shorter length"
        )
    rows = (len(corpus) - 1) // length
    rows = rows if limit is None else min(rows, limit)
    inputs, targets = corpus[: rows * length], corpus[1 : rows * length + 1]
    return Rows(inputs.view(rows, length), targets.view(rows, length))


def masked(rows: Rows, mask: int, seed: int = 0) -> Rows:
    """Hide 15% of each row's tokens, at least one. The targets are what was hidden, and IGNORED elsewhere.

    Of these tokens 80% become `mask`, a token that the text lacks, 10% any token below it, and 10% stay, so
    that a model cannot know which ones count (Devlin et al. 2018, section 3.1). All rows have equally many.
    So the mean over rows, by which ranks and micro-batches weigh their losses, is that over hidden tokens.

    Takes 12 bytes a token while it works, and keeps 4. The same seed hides the same tokens everywhere.
    """
    tokens, draw = rows.inputs.to(torch.int16), generator(seed, "masked")  # (N, T)
    count = max(1, round(HIDDEN * tokens.shape[1]))
    hidden = torch.rand(tokens.shape, generator=draw).topk(count, dim=1).indices  # (N, count)
    original = tokens.gather(1, hidden)
    shown = torch.randint(mask, original.shape, generator=draw, dtype=torch.int16)
    chance = torch.rand(original.shape, generator=draw)
    shown = torch.where(chance < 0.8, mask, torch.where(chance < 0.9, shown, original)).to(torch.int16)
    targets = torch.full_like(tokens, IGNORED).scatter_(1, hidden, original)
    return Rows(tokens.scatter(1, hidden, shown), targets)


def dataset(name: str, *, length: int | None = None, limit: int | None = None) -> Dataset:
    """Return the data set of that name: "digits", or "bytes" in rows of `length` tokens (64 by default).

    limit: most rows to train on and to test on. Raises ValueError for an unknown name, and for a length with
    "digits", which are not sequences.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    if name == "digits":
        if length is not None:
            raise ValueError(
                f"length is {length}, but the digits are not sequences; leave it out, or take 'bytes'"
            )
        return digits(limit)
    length = 64 if length is None else length
    corpus = stdlib_bytes(limit=None if limit is None else limit * length + 1)
    train, validation = (windows(half, length, limit=limit) for half in (corpus.train, corpus.validation))
    return Dataset("bytes", train, validation, classes=256)


def _widened(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.long()


_FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# The build or the machine's owner writes these, so they differ between machines with the same Python.
_PREFIXES_LEFT_OUT = ("config-", "_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


def _python_files(folder: Path) -> Iterator[str]:
    """Relative paths, with forward slashes, in the order in which the disk gives them."""
    for parent, children, files in os.walk(folder):
        children[:] = [
            c for c in children if c not in _FOLDERS_LEFT_OUT and not c.startswith(_PREFIXES_LEFT_OUT)
        ]
        for file in files:
            if file.endswith(".py") and not file.startswith(_PREFIXES_LEFT_OUT):
                yield Path(parent, file).relative_to(folder).as_posix()


def _check_limit(limit: int | None) -> None:
    if limit is not None:
        check_whole("limit", limit, 1, ", or None for all")
