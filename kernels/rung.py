"""A rung: one way to multiply two matrices, as a callable that says what it is.

A ladder is a tuple of rungs. Tests, benchmarks, lessons and the network's `Linear` take a rung and call
`rung.matmul(a, b)`; they work with any rung. The checks that all rungs need (shapes, dtypes, memory, sizes
of 0) are here, so that a rung's file holds its kernel and nothing else.

Letters, here and in every rung: a is (m, k), b is (k, n), c and out are (m, n); i, j and p run
over m, n and k.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = "NDArray[Any]"
StepT = TypeVar("StepT", bound="Step")
OperandT = TypeVar("OperandT")  # a NumPy array; CUDA rungs also take torch tensors
Compute = Callable[[Any, Any, Any], None]  # compute(a, b, out): arrays, or a CUDA rung's matrices


CACHE_LINE = 64  # bytes


def empty(rows: int, columns: int, dtype: DTypeLike) -> Array:
    """Return a new (rows, columns) array in C order that starts on a cache line; its values are arbitrary.

    NumPy promises only 16 bytes. If rows start inside a cache line, vectors straddle two lines: rung 4 then
    takes twice as long at 64 x 64 (1.2 times at 512), and the start changes from run to run.
    """
    kind = np.dtype(dtype)
    size = rows * columns * kind.itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(kind).reshape(rows, columns)


def ladder(
    package: str, name: str, cuda: bool = False
) -> tuple[tuple[str, ...], Callable[[str], Any], Callable[[str], Any]]:
    """Return RUNGS, load and __getattr__ of a package whose rungs are imported when they are first asked for.

    RUNGS names their files by their numbers, load returns the rung of a file, and __getattr__ makes the
    ladder called `name`. Both raise ImportError if rungs need `cuda` and numba-cuda is not installed.
    """
    module = sys.modules[package]
    files = (path.stem for path in Path(str(module.__file__)).parent.glob("s[0-9]*_*.py"))
    names = tuple(sorted(files, key=lambda name: int(name[1:].partition("_")[0])))

    def load(rung: str) -> Any:
        if cuda:
            importlib.import_module(".cuda.runtime.device", __package__).require_toolkit()
        return importlib.import_module(f".{rung}", package).RUNG

    def attribute(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {package!r} has no attribute {asked!r}")
        return vars(module).setdefault(name, tuple(map(load, names)))

    return names, load, attribute


def require_numba() -> None:
    """Raise RuntimeError if the environment keeps Numba from compiling."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise RuntimeError(
            "NUMBA_DISABLE_JIT is set, with which Numba compiles nothing and runs functions as plain Python; "
            "from rung 3 on a rung is machine code: unset NUMBA_DISABLE_JIT"
        )


@dataclass(frozen=True)
class Step:
    """What any step of a ladder says of itself."""

    place: ClassVar[Literal["cpu", "cuda"]] = "cpu"  # the device of all steps of a class
    number: int  # in the ladder, from 1
    name: str  # of its file: "s1_python_loops"
    device: Literal["cpu", "cuda"]  # where the kernel runs
    idea: str  # one sentence: the one change from the rung before it, and why that is faster
    dtypes: tuple[str, ...]  # NumPy's names of the dtypes that it takes
    compute: Callable[..., None]  # fills its output, without warnings; the kind of ladder says with what
    cores: Literal["one", "all"] = "one"  # how many cores of a CPU it uses

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}: a rung runs on 'cpu' or 'cuda'")
        if self.cores not in ("one", "all"):
            raise ValueError(f"cores is {self.cores!r}: a rung uses 'one' or 'all'")

    @classmethod
    def of_file(cls: type[StepT], module: str, **fields: Any) -> StepT:
        """Return the rung of the file called `module`: it says number and name. A copy's number is 0."""
        found = re.search(r"s(\d+)_\w+$", module)
        number, name = (int(found[1]), found[0]) if found else (0, module.rpartition(".")[2])
        return cls(number=number, name=name, device=cls.place, **fields)

    @functools.cached_property
    def _dtypes(self) -> tuple[np.dtype[Any], ...]:
        """`dtypes` as NumPy objects; bfloat16 only if ml_dtypes, which defines it, is installed.

        Names do not suffice: a byte-swapped float64 is named "float64" too.
        """
        if "bfloat16" in self.dtypes:
            with contextlib.suppress(ImportError):
                import ml_dtypes  # noqa: F401
        found = []
        for name in self.dtypes:
            with contextlib.suppress(TypeError):
                found.append(np.dtype(name))
        return tuple(found)


@dataclass(frozen=True)
class Rung(Step):
    """One step of a ladder of matrix multiplications; a rung's file ends in `RUNG = Rung.of_file(...)`.

    `compute` overwrites `out`. It is called with m, n and k >= 1, aligned arrays of any strides, and an `out`
    that shares no memory with a or b.
    """

    compute: Compute
    aligned: bool = True  # whether it is faster if the rows of a new out start on a cache line
    tf32: bool = False  # whether it rounds float32 factors to TF32, for tensor cores
    factors: float = 0.0  # the largest relative error with which it takes float32 factors in other formats

    def matmul(self, a: OperandT, b: OperandT, out: OperandT | None = None) -> OperandT:
        """Multiply a (m, k) by b (k, n), and return c (m, n) in their dtype.

        Sizes may be anything, also 0 (k = 0 gives zeros), and so may strides: transposed views, slices,
        negative steps. NaN and infinity follow IEEE 754, without warnings. The result is `out` if given, else
        a new array in C order.

        Raises TypeError for an argument that is not a NumPy array, for an array beside a tensor, and for a
        dtype that this rung does not take or that differs between the arguments; ValueError for shapes that
        do not multiply, and for an `out` that has another shape, is read-only, shares memory with a or b, or
        is the same memory more than once, as an expanded tensor is.
        """
        if type(a) is not type(b):
            check_kinds(a, b)
        given: Any = a, b
        x, y = self._matrix("a", a), self._matrix("b", b)
        if x.dtype != y.dtype:
            raise TypeError(
                f"a is {given[0].dtype} and b is {given[1].dtype}: convert one with .astype(), so that both "
                "are the same"
            )
        (rows, k), (depth, columns) = x.shape, y.shape
        if k != depth:
            check_sizes(x.shape, y.shape)
        c: Any = out
        if c is None:
            dtype = given[0].dtype
            c = empty(rows, columns, dtype) if self.aligned else np.empty((rows, columns), dtype)
        else:
            self._check_out(given[0], given[1], c)
        if k == 0:
            c[...] = 0  # an empty sum
        elif rows and columns:
            self._fill(x, y, c)
        result: OperandT = c
        return result

    def sums(self, dtype: str) -> str:
        """Return the name of the dtype in which this rung adds products of factors of `dtype`."""
        return dtype

    def _fill(self, a: Array, b: Array, out: Array) -> None:
        """Fill `out` with the product. `CudaRung`, whose kernels take matrices, overrides this."""
        self.compute(a, b, out)

    def _matrix(self, name: str, x: Any) -> Array:
        """Return x as a plain aligned 2-D array, or raise what is wrong with it."""
        # The usual case first: what is done here takes a tenth of a small product.
        if type(x) is np.ndarray and x.ndim == 2 and x.dtype in self._dtypes and x.flags.aligned:
            return x
        check_matrix(name, x)
        if x.dtype not in self._dtypes:
            raise TypeError(
                f"{name} has dtype {x.dtype}, and rung {self.name} takes {' or '.join(self.dtypes)}: "
                f"convert it with .astype({self.dtypes[-1]!r})"
            )
        # Compiled code uses aligned loads, so an unaligned view (a field of a packed record) is copied.
        return np.require(x, requirements=["ALIGNED", "ENSUREARRAY"])

    def _check_out(self, a: Array, b: Array, out: Array) -> None:
        if not isinstance(out, np.ndarray):
            raise TypeError(_not_an_array("out", out))
        shape = (a.shape[0], b.shape[1])
        if out.shape != shape:
            raise ValueError(
                f"out has shape {out.shape}, but {a.shape} times {b.shape} gives {shape}: pass that shape"
            )
        if out.dtype != a.dtype and not self._takes_out(a.dtype.name, out.dtype.name):
            raise TypeError(f"out is {out.dtype}, and a and b are {a.dtype}: pass an out of that dtype")
        if not (out.flags.writeable and out.flags.aligned):
            raise ValueError("out is read-only or not aligned in memory: pass an array that can be written")
        if meets_itself(shape, out.strides):
            raise ValueError("out has elements that are the same memory: pass an array of its own")
        for name, x in (("a", a), ("b", b)):
            if np.may_share_memory(out, x) and np.shares_memory(out, x):
                raise shared_memory(name)

    def _takes_out(self, dtype: str, out: str) -> bool:
        """Return whether a product of dtype `dtype` may be written to an `out` of dtype `out`."""
        return False


@functools.cache  # making the name takes a microsecond
def dtype_name(dtype: Any) -> str:
    """Return the name of NumPy's or torch's dtype, such as "float32"; ">f4" for a byte-swapped one."""
    return str(dtype).removeprefix("torch.")


def torch_of(*operands: object) -> Any:
    """Return torch if one of these is a tensor, else None: a caller with a tensor has imported it."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and any(isinstance(x, torch.Tensor) for x in operands) else None


def check_kinds(a: object, b: object) -> None:
    """Raise TypeError if one operand is a torch tensor and the other is not."""
    torch = torch_of(a, b)
    if torch is not None and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        tensor, other, x = ("a", "b", b) if isinstance(a, torch.Tensor) else ("b", "a", a)
        raise TypeError(
            f"{other} is a {type(x).__name__} and {tensor} is a torch tensor: pass arrays alone, with "
            f"tensor.numpy(), or tensors alone, with torch.as_tensor({other}); minidist.model.matmul.matmul "
            "takes tensors for every rung"
        )


def check_matrix(name: str, x: Any) -> None:
    """Raise TypeError unless x is a NumPy array, and ValueError unless it has two dimensions."""
    if not isinstance(x, np.ndarray):
        raise TypeError(_not_an_array(name, x))
    if x.ndim != 2:
        raise ValueError(
            f"{name} has {x.ndim} dimensions, shape {x.shape}: reshape it to two, (rows, columns)"
        )


def check_sizes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Raise ValueError unless matrices of the shapes a and b multiply."""
    if a[1] != b[0]:
        raise ValueError(
            f"a has shape {tuple(a)} and b has shape {tuple(b)}, which do not multiply: "
            f"the columns of a ({a[1]}) must be as many as the rows of b ({b[0]})"
        )


def meets_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of a matrix are one memory. strides: in elements, or in bytes of whole ones."""
    (rows, columns), (down, right) = shape, map(abs, strides)
    if rows * columns < 2:
        return False
    common = math.gcd(down, right)  # so many columns right are so many rows down
    return not common or (right // common < rows and down // common < columns)


def shared_memory(name: str) -> ValueError:
    """Return the error for an `out` that overlaps the argument called `name`."""
    return ValueError(
        f"out shares memory with {name}, which is read while out is written: pass another array"
    )


def _not_an_array(name: str, x: object) -> str:
    # Compare the module's name: importing torch only to refuse its tensors would cost a second.
    if type(x).__module__.partition(".")[0] == "torch":
        return f"{name} is a torch tensor: pass tensor.numpy(), or use minidist.model.matmul.matmul"
    return f"{name} is a {type(x).__name__}, not a NumPy array: convert it with numpy.asarray()"
