"""Which of several NVVMs compiles kernels, and what is said where none fits."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.kernels.cuda.runtime import nvvm
from tests.helpers.fresh_python import output_of

WHEEL, TOOLKIT, OLD = Path("/wheels/libnvvm.so.4"), Path("/usr/local/cuda/libnvvm.so.4"), Path("/old/lib")


@pytest.mark.parametrize(
    ("linker", "expected"),
    [((13, 5), WHEEL), ((13, 4), TOOLKIT), ((13, 0), TOOLKIT), ((14, 0), WHEEL), ((12, 9), OLD)],
)
def test_the_newest_that_the_linker_takes_is_chosen(linker, expected):
    found = {OLD: "12.9.86", WHEEL: "13.5.37", TOOLKIT: "13.0.88"}
    chosen = nvvm.choose(found, linker)
    assert chosen.path == expected
    assert f"no newer than nvJitLink {linker[0]}.{linker[1]}; not " in chosen.reason
    assert all(version in chosen.reason for path, version in found.items() if path != expected)


def test_the_newest_is_so_by_number_and_the_first_of_equals_is_taken():
    assert nvvm.choose({OLD: "13.9.1", WHEEL: "13.10.1"}, (13, 12)).path == WHEEL
    chosen = nvvm.choose({WHEEL: "13.0.88", TOOLKIT: "13.0.88"}, (13, 0))
    assert chosen.path == WHEEL


def test_where_all_are_too_new_the_remedy_is_named():
    with pytest.raises(
        ImportError, match=r"NVVM 13\.5\.37 in /wheels is newer than nvJitLink 13\.0.*13\.0\.\*'"
    ):
        nvvm.choose({WHEEL: "13.5.37"}, (13, 0))
    assert nvvm.choose({}, (13, 0)) is None


def library(folder, version):
    folder.mkdir(parents=True)
    file = folder / nvvm.LIBRARY
    file.write_bytes(b"\x7fELF code\0Cuda compilation tools, release 13.0, V" + version + b"\0more")
    return file


def test_copies_are_found_on_pythons_path_in_toolkits_and_on_the_loaders_path(monkeypatch, tmp_path):
    carried = library(tmp_path / "carried/nvidia/cu13/lib", b"13.2.1")
    home = library(tmp_path / "home/nvvm/lib64", b"13.1.9")
    installed = library(tmp_path / "local/cuda-13.0/nvvm/lib64", b"13.0.88")
    loaders = library(tmp_path / "elsewhere", b"12.9.86")
    (tmp_path / "local/cuda").symlink_to(tmp_path / "local/cuda-13.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "carried"), str(tmp_path / "none")])
    monkeypatch.setattr(nvvm, "TOOLKITS", tmp_path / "local")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'elsewhere'}")
    for name in ("CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    found = {path: nvvm.version(path) for path in nvvm.copies()}
    assert found == {carried: "13.2.1", home: "13.1.9", installed: "13.0.88", loaders: "12.9.86"}
    loaders.write_bytes(b"no version")
    assert nvvm.version(loaders) == "0"


def test_the_chosen_one_is_what_numba_compiles_with():
    program = """
from minidist.kernels.cuda.runtime import device, nvvm
device.require_compiler()
from cuda import pathfinder
print(pathfinder.load_nvidia_dynamic_lib("nvvm").abs_path == str(nvvm.load().path))
"""
    assert output_of(program) == "True"


def test_numba_cuda_is_imported_where_numpy_has_no_row_stack():
    program = """
import numpy
vars(numpy).pop("row_stack", None)
from minidist.kernels.cuda import load
from numba.cuda.np import arrayobj
print(load("s1_naive").name, numpy.row_stack is numpy.vstack)
"""
    assert output_of(program) == "s1_naive True"
