"""Data: splits that no machine, disk or new file can move; views and not copies; errors that help."""

import hashlib
import sys

import pytest
import torch

from minidist.model.data import Rows, dataset, digits, stdlib_bytes, windows
from tests.helpers.refusals import refuses


@pytest.fixture(scope="module")
def corpus():
    return stdlib_bytes()


def make_library(root, files=40):
    for number in range(files):
        folder = root / f"package{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_bytes(b"x = %d\n" % number)
    return root


def test_digits_are_1437_rows_to_learn_from_and_360_held_out():
    data = digits()
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    inputs, targets = data.train[torch.arange(13)]
    assert (inputs.shape, inputs.dtype) == ((13, 64), torch.float32)
    assert (targets.shape, targets.dtype) == ((13,), torch.int64)
    assert data.train.inputs.min() == 0
    assert data.train.inputs.max() == 1
    assert torch.equal(data.train.inputs * 16, (data.train.inputs * 16).round())
    # Each class is in both halves, and each image in one: 1797 images of which no two are the same.
    assert torch.bincount(data.train.targets).min() > 100
    assert torch.bincount(data.test.targets).min() > 20
    assert len(torch.unique(torch.cat([data.train.inputs, data.test.inputs]), dim=0)) == 1797


def test_the_digits_split_is_the_same_everywhere():
    data = digits()
    text = "".join(str(target) for rows in (data.train, data.test) for target in rows.targets.tolist())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a8c62cbe106fe543"
    assert data.fingerprint()[:16] == "48ab9fe1d980df3c"
    assert digits().fingerprint() == data.fingerprint()


def test_a_limit_takes_the_first_rows_of_both_halves():
    few, all_rows = digits(limit=7), digits()
    assert (len(few.train), len(few.test)) == (7, 7)
    assert torch.equal(few.train.inputs, all_rows.train.inputs[:7])
    assert few.fingerprint() != all_rows.fingerprint()
    assert len(digits(limit=10_000).test) == 360


test_a_limit_is_a_whole_number = refuses(
    lambda limit: digits(limit=limit),
    (True, TypeError, r"^limit is True \(bool\); give an integer, or None for all$"),
    (2.5, TypeError, r"^limit is 2\.5 \(float\); give an integer, or None for all$"),
    (0, "^limit is 0; give at least 1, or None for all$"),
)


def test_without_scikit_learn_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "minidist\[bench\]"'):
        digits()


def test_the_corpus_is_split_by_file_and_holds_library_source_only(corpus):
    assert corpus.train.dtype == corpus.validation.dtype == torch.uint8
    assert not set(corpus.train_files) & set(corpus.validation_files)
    files = corpus.train_files + corpus.validation_files
    assert len(corpus.train_files) == len(set(corpus.train_files))
    assert "os.py" in files
    assert not [f for f in files if {"test", "tests", "site-packages", "__pycache__"} & set(f.split("/"))]
    assert list(corpus.train_files) == sorted(corpus.train_files)
    assert 0.02 < len(corpus.validation) / (len(corpus.validation) + len(corpus.train)) < 0.25


def test_a_new_file_moves_no_other_and_a_folders_order_does_not_matter(tmp_path):
    root = make_library(tmp_path)
    before = stdlib_bytes(root)
    (root / "a_new_one.py").write_text("pass\n")
    after = stdlib_bytes(root)
    assert set(before.train_files) <= set(after.train_files)
    assert set(before.validation_files) <= set(after.validation_files)
    text = b"".join((root / name).read_bytes() for name in before.validation_files)
    assert bytes(before.validation.tolist()) == text


def test_what_differs_between_machines_is_left_out(tmp_path):
    root = make_library(tmp_path)
    before = stdlib_bytes(root)
    for name in ("site-packages/numpy", "config-3.11-x86_64", "test", "idlelib/idle_test", "__pycache__"):
        (root / name).mkdir(parents=True)
        for number in range(20):
            (root / name / f"file{number}.py").write_text("pass\n")
    (root / "_sysconfigdata__linux.py").write_text("pass\n")
    (root / "sitecustomize.py").write_text("pass\n")
    (root / "notes.txt").write_text("pass\n")
    after = stdlib_bytes(root)
    assert (after.train_files, after.validation_files) == (before.train_files, before.validation_files)


def test_unreadable_files_are_passed_over(tmp_path):
    root = make_library(tmp_path)
    before = stdlib_bytes(root)
    (root / before.train_files[0]).unlink()
    (root / before.train_files[0]).symlink_to(root / "nowhere.py")
    (root / "folder.py").mkdir()
    after = stdlib_bytes(root)
    assert after.train_files == before.train_files[1:]
    assert after.validation_files == before.validation_files


@pytest.mark.parametrize("files", [0, 1])
def test_a_library_with_nothing_to_read_is_one_sentence(tmp_path, files):
    with pytest.raises(FileNotFoundError, match="bytes of readable Python source"):
        stdlib_bytes(make_library(tmp_path, files))
    with pytest.raises(FileNotFoundError, match="0 bytes of readable"):
        stdlib_bytes(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("tokens", "length", "rows"), [(2, 1, 1), (9, 4, 2), (10, 4, 2), (13, 4, 3), (5, 4, 1)]
)
def test_windows_follow_one_another_with_targets_one_token_on(tokens, length, rows):
    text = torch.randint(256, (tokens,), dtype=torch.uint8)
    inputs, targets = windows(text, length)[:]
    assert inputs.shape == targets.shape == (rows, length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == text[: rows * length].tolist()
    assert targets.flatten().tolist() == text[1 : rows * length + 1].tolist()


def test_windows_refuse_what_makes_no_row():
    text = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="8 tokens, too few for length 8"):
        windows(text, 8)
    with pytest.raises(ValueError, match="length is 0"):
        windows(text, 0)
    with pytest.raises(TypeError, match="one row of integers"):
        windows(text.float(), 2)
    with pytest.raises(TypeError, match="one row of integers"):
        windows(text.view(2, 4), 2)


def test_rows_keep_floating_targets_and_refuse_unequal_lengths():
    rows = Rows(torch.rand(3, 2), torch.rand(3, dtype=torch.float64))
    assert rows[torch.tensor([1])][1].dtype == torch.float64
    with pytest.raises(ValueError, match="3 inputs have 2 targets"):
        Rows(torch.rand(3, 2), torch.rand(2))


def test_the_registry_knows_both_by_name():
    assert dataset("digits", limit=5).fingerprint() == digits(limit=5).fingerprint()
    data = dataset("bytes", length=17, limit=9)
    assert (len(data.train), len(data.test), data.classes) == (9, 9, 256)
    inputs, targets = data.test[torch.arange(9)]
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert torch.equal(inputs.flatten(), stdlib_bytes(limit=9 * 17).validation.long())
    with pytest.raises(ValueError, match="unknown data set 'digit': did you mean 'digits'"):
        dataset("digit")
    with pytest.raises(ValueError, match="unknown data set 'xyzzy': known are digits, bytes"):
        dataset("xyzzy")
    with pytest.raises(ValueError, match="length is 8"):
        dataset("digits", length=8)


def test_the_library_of_this_python_is_read_by_default(corpus):
    source = (sys.modules["os"].__file__, "os.py")
    half, files = (
        (corpus.train, corpus.train_files)
        if source[1] in corpus.train_files
        else (corpus.validation, corpus.validation_files)
    )
    assert source[1] in files
    with open(source[0], "rb") as file:
        assert file.read() in half.numpy().tobytes()
