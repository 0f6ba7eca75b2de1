"""For every dtype, operation, algorithm and form of tensor a call is right, or in the table of refusals."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.comm.tensor_checks import OPERATIONS, REFUSALS, Refusal, refusal
from minidist.comm.work import ALGORITHMS
from tests.comm.one_process import REDUCE
from tests.conftest import Clusters

Shared = dict[Any, torch.Tensor]
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex32"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
)


class Case(NamedTuple):
    """One call of the communication API."""

    operation: str
    op: str  # "" where nothing is reduced
    dtype: str
    algorithm: str
    form: str  # of the tensor
    rows: int  # of each rank's part
    asynchronous: bool


def cases() -> Iterator[Case]:
    for dtype, form, rows, asynchronous in itertools.product(
        DTYPES, ("plain", "strided", "shared", "conjugate"), (0, 1, 3), (False, True)
    ):
        if form == "conjugate" and not dtype.startswith("complex"):
            continue
        for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"):
            ops = tuple(OPERATIONS) if operation in ("all_reduce", "reduce_scatter") else ("",)
            for op, algorithm in itertools.product(ops, ("auto", *ALGORITHMS[operation])):
                yield Case(operation, op, dtype, algorithm, form, rows, asynchronous)
        for operation, algorithm in (
            *(("gather", "torch"), ("scatter", "torch"), ("send", "torch"), ("send", "shared_memory")),
        ):
            yield Case(operation, "", dtype, algorithm, form, rows, asynchronous)


def make(case: Case, values: torch.Tensor, shared: Shared | None, group: Any) -> torch.Tensor:
    """A tensor of these values in the case's form; in shared memory only where `shared` is given."""
    dtype = values.dtype
    if case.form == "strided":
        whole = torch.zeros(*values.shape, 2, dtype=dtype)
        x = whole[..., 1]
        return x.copy_(values)
    if case.form in ("shared", "conjugate") and shared is not None:
        if (dtype, group) not in shared:
            shared[dtype, group] = comm.empty_shared((64,), dtype, group)
        x = shared[dtype, group][: values.numel()].view(values.shape)
        return x.copy_(values) if case.form == "shared" else x.copy_(values.conj()).conj()
    if case.form == "conjugate":
        return values.conj().clone().conj()
    return values.clone()


def call(
    case: Case, whole: torch.Tensor, shared: Shared, group: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a call gives, and what it has to give."""
    rank, ranks, last = md.rank(), md.size(), md.size() - 1
    own = slice(rank * case.rows, (rank + 1) * case.rows)
    x = make(case, whole[rank], shared, group)
    rest: dict[str, Any] = {"group": group, "async_op": case.asynchronous}
    if case.operation in ALGORITHMS and case.operation != "send":
        rest["algorithm"] = case.algorithm
    done: Any
    if case.op:
        done = getattr(comm, case.operation)(x, case.op, **rest)
        wide = whole.to(torch.complex128 if whole.is_complex() else torch.float64)
        wanted = REDUCE[case.op](wide)
        wanted = (wanted != 0 if case.dtype == "bool" else wanted).to(whole.dtype)
        wanted = wanted if case.operation == "all_reduce" else wanted[own]
    elif case.operation == "all_gather":
        done, wanted = comm.all_gather(x, **rest), whole.flatten(0, 1)
    elif case.operation == "broadcast":
        done, wanted = comm.broadcast(x, last, **rest), whole[last]
    elif case.operation == "all_to_all":
        done, wanted = comm.all_to_all(x, **rest), whole[:, own].flatten(0, 1)
    elif case.operation == "gather":
        done, wanted = comm.gather(x, last, **rest), whole.flatten(0, 1) if rank == last else None
    elif case.operation == "scatter":
        out = torch.empty_like(whole[last][own])
        done, wanted = comm.scatter(x if rank == last else None, out, last, **rest), whole[last][own]
    else:
        rest["async_op"] = True
        with comm.using(case.algorithm):
            into = make(case, torch.zeros_like(whole[0]), None, group)
            sent = comm.send(x, (rank + 1) % ranks, **rest)
            done, wanted = comm.recv(into, (rank - 1) % ranks, group=group), whole[rank - 1]
            sent.wait()
    return done.wait() if isinstance(done, comm.Work) else done, wanted


def alike(found: torch.Tensor | None, wanted: torch.Tensor | None, op: str) -> bool:
    if found is None or wanted is None:
        return found is wanted
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    found, wanted = (
        x.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1) for x in (found, wanted)
    )
    if not op:
        return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    wide = torch.complex128 if found.is_complex() else torch.float64
    return torch.allclose(found.to(wide), wanted.to(wide), rtol=1e-2 if op == "mean" else 0.0, atol=0.0)


def attempt(chosen: list[Case], group: Any = None) -> list[str]:
    """Make calls, and say which were wrong, or were refused without a row in the table."""
    warnings.simplefilter("ignore")  # torch calls complex32 experimental
    problems, shared = [], Shared()
    for number, case in enumerate(chosen):
        dtype = getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(number)
        numbers = torch.randint(0, 4, (md.size(), case.rows * md.size()), generator=generator)
        parts = numbers.float() if case.dtype.startswith("float8") else numbers
        whole = (parts + 1j * (3 - parts) if dtype.is_complex else parts).to(dtype)
        row = refusal(case.operation, case.op, dtype, case.algorithm)
        try:
            found, wanted = call(case, whole, shared, group)
        except TypeError as error:
            if row is None or not str(error).endswith(f"{row.why}; {row.remedy}"):
                problems.append(f"{case}: {error}")
            continue
        if row is not None:
            problems.append(f"{case} is in the table, and was not refused")
        elif not alike(found, wanted, case.op):
            problems.append(f"{case}: {found} and not {wanted}")
    return problems


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sample_of_all_calls(cluster_of: Clusters, ranks: int) -> None:
    assert cluster_of(ranks).run(attempt, [*cases()][ranks::67]) == [[]] * ranks


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_calls(ranks: int) -> None:

    drawn = [*cases()]
    random.Random(0).shuffle(drawn)
    with md.Cluster(ranks, timeout=500.0) as cluster:
        assert cluster.run(attempt, drawn[ranks - 2 :: 3]) == [[]] * ranks


@pytest.mark.parametrize("row", REFUSALS)
def test_each_remedy_helps(row: Refusal) -> None:
    for operation, op, dtype, remedy in itertools.product(
        row.operations, row.ops, row.dtypes, row.remedy.split(", or ")
    ):
        what, _, to = remedy.rpartition("convert to " if "convert" in remedy else "=")
        told = {"op": op, "dtype": dtype, "algorithm": row.algorithm} | {
            what.rpartition(" ")[2] or "dtype": to.strip("'").replace("floats", "torch.float32")
        }
        dtype_told = getattr(torch, told["dtype"].removeprefix("torch."))
        assert refusal(operation, told["op"], dtype_told, told["algorithm"]) is None


@pytest.mark.parametrize(
    ("operation", "x"),
    [
        ("all_reduce", [1.0, 2.0]),
        ("all_reduce", torch.eye(2).to_sparse()),
        ("all_gather", torch.empty(2, device="meta")),
        ("broadcast", torch.ones(1).expand(2)),
        ("reduce_scatter", torch.tensor(1.0)),
    ],
)
def test_the_code_in_an_error_helps(operation: str, x: Any) -> None:
    call = getattr(comm, operation)
    with pytest.raises((TypeError, ValueError)) as refused:
        call(x)
    code = re.findall(r"(?:x|torch)\.\w+(?:\(.*?\))?", str(refused.value))[-1]
    made = eval(code, {"x": x, "torch": torch})
    call(made(x) if callable(made) else made)


def table() -> str:
    """The refusals as Markdown."""
    lines = ["| Operation | `op` | dtype | Algorithm | Why | Remedy |", "|---|---|---|---|---|---|"]
    for row in REFUSALS:
        ops = "any" if row.ops == tuple(OPERATIONS) else ", ".join(row.ops)
        cells = ", ".join(row.operations), ops, ", ".join(row.dtypes), row.algorithm, row.why, row.remedy
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert table() in text, table()
