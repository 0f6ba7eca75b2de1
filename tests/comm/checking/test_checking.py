"""`check=True`: legal programs pass, and every mismatch is one error on all ranks that names both calls."""

from __future__ import annotations

import linecache
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist import comm
from minidist.model import GPT, GPTConfig
from tests.comm.programs import run_script, torchrun
from tests.conftest import Clusters
from tests.helpers.clocks import HANG
from tests.helpers.refusals import error_of


@pytest.fixture(scope="module")
def checked() -> Iterator[Clusters]:
    """`checked(n)`: a warm cluster of n ranks that compare their calls."""
    with ExitStack() as clusters:
        yield cache(lambda ranks: clusters.enter_context(md.Cluster(ranks, timeout=HANG, check=True)))


def told(cluster: md.Cluster, program: Callable[[], Any], begins: bool = False) -> str:
    """The error that a program ends in, which has to be the same on all ranks.

    begins: a call of it begins before the error, which is not caught then: it leaves the ranks out of step.
    """

    if begins:
        with pytest.raises(md.RankError) as caught:
            cluster.run(program)
        assert isinstance(caught.value.__cause__, comm.CollectiveError)
        return str(caught.value.__cause__)
    texts = cluster.run(error_of, comm.CollectiveError, program)
    assert len(set(texts)) == 1, texts
    return texts[0]


def line_of(text: str) -> int:
    """The number of this file's one line that ends in `# text`."""
    found = [
        i for i, line in enumerate(linecache.getlines(__file__), 1) if line.rstrip().endswith(f"# {text}")
    ]
    assert len(found) == 1, (text, found)
    return found[0]


# Programs that are right.


def every_call() -> None:
    rank, ranks = md.rank(), md.size()
    x = torch.arange(6.0 * ranks).view(2 * ranks, 3)
    comm.all_reduce(x.clone(), "mean")
    comm.reduce_scatter(x, "max")
    comm.all_gather(x, out=x.new_empty(2 * ranks * ranks, 3))
    comm.broadcast(x, source=ranks - 1)
    comm.all_to_all(x)
    comm.gather(x, destination=1)
    comm.scatter(x if rank == 1 else None, x.new_empty(2, 3), source=1)
    comm.barrier()
    comm.all_reduce(torch.tensor(1.0))
    comm.all_reduce(torch.empty(0))
    sent = comm.send(x, (rank + 1) % ranks, tag=3, async_op=True)
    comm.recv(x.clone(), (rank - 1) % ranks, tag=3)
    sent.wait()


def uneven_parts() -> None:
    sends = [md.rank() + place for place in range(md.size())]
    comes = [place + md.rank() for place in range(md.size())]
    received = comm.all_to_all(torch.full((sum(sends), 2), float(md.rank())), sends, comes)
    assert len(received) == sum(comes)


def sum_gradients() -> None:
    comm.all_reduce(torch.ones(10))  # gradients


def sum_losses() -> None:
    comm.all_reduce(torch.ones(10))  # losses


def reduce(x: torch.Tensor) -> None:
    comm.all_reduce(x)  # helper


def leaders_in_turn_in_functions() -> None:
    for step in range(4):
        if md.rank() == step % md.size():
            sum_gradients()
        else:
            sum_losses()
    for step in range(4):
        if md.rank() == step % md.size():
            reduce(torch.ones(3))
        else:
            reduce(torch.zeros(3))


def meant_to_be_in_another_order() -> None:
    both = [sum_gradients, sum_losses]
    for each in both if md.rank() == 0 else both[::-1]:
        if md.rank() == 0:
            with comm.unordered():
                each()
        else:
            each()


def asynchronous_in_other_places() -> None:
    """A rank that has to come by for another's asynchronous call to complete does other things first."""
    x = torch.ones(3)
    comm.barrier()  # a group's first call would wait for all its ranks
    if md.rank() == 0:
        work = comm.all_reduce(x, async_op=True)
        comm.send(torch.ones(2), 1)
        work.wait()
    elif md.rank() == 1:
        comm.recv(torch.ones(2), 0)
        comm.all_reduce(x)
    else:
        comm.all_reduce(x)
    works = [comm.all_reduce(torch.ones(i), async_op=True) for i in range(80)]
    comm.barrier()
    for work in reversed(works):
        work.wait()
    comm.all_reduce(x, async_op=True)  # and nobody waits for it


def groups() -> None:
    both = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    odd = [dist.new_group([0]), dist.new_group([md.size() - 1, 0])]
    x = torch.ones(2)
    if md.rank() < 2:
        # Two groups of the same ranks are two orders, once both have made their memory.
        for group in both:
            comm.barrier(group)
        works = [comm.all_reduce(x.clone(), group=both[i], async_op=True) for i in (md.rank(), 1 - md.rank())]
        for work in works:
            work.wait()
    if md.rank() in (0, md.size() - 1):
        comm.all_reduce(x, "max", group=odd[1])
    if md.rank() == 0:
        comm.all_reduce(torch.ones(5), group=odd[0])
    comm.all_reduce(x)


def hooks_of_autograd() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    works = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(comm.all_reduce(p.grad, async_op=True))
        )
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    for work in works:
        work.wait()


def two_threads() -> None:
    """Another thread makes the call for which a rank waits, while this one waits for that rank."""
    group = dist.new_group(list(range(md.size())))
    thread = threading.Thread(target=lambda: comm.all_reduce(torch.ones(2), group=group))
    if md.rank() == 0:
        thread.start()
        thread.join()
        comm.all_reduce(torch.ones(3))
    else:
        timer = threading.Timer(0.3, thread.start)
        timer.start()
        comm.all_reduce(torch.ones(3))
        timer.join()
        thread.join()


def training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine = md.prepare(model, lambda p: torch.optim.SGD(p, lr=0.1), md.Layout(dp=md.size()))
    engine.step(torch.rand(3, 4), torch.zeros(3, dtype=torch.long))
    engine.evaluate(torch.rand(3, 4), torch.zeros(3, dtype=torch.long))
    md.assert_in_sync(nn.ModuleList([model[0]]))


def sharded_training() -> None:
    """The first call is made while the module that shards is half made."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    sharded = md.FullyShard(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        sharded(torch.rand(3, 4)).sum().backward()
        sharded.step()


def model_parallel_training() -> None:
    for axis in ("tp", "pp", "cp"):
        tiny = GPTConfig(vocabulary=13, context=8, layers=3, heads=3, width=6)
        layout = md.Layout.parse(f"{axis}={md.size()},micro_batches=2")
        engine = md.prepare(GPT(tiny), lambda p: torch.optim.SGD(p, lr=0.1), layout)
        tokens = torch.randint(13, (2, 4, 8), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            engine.step(*tokens)
        engine.evaluate(*tokens)
        engine.full_state_dict()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "program",
    [
        sharded_training,
        model_parallel_training,
        every_call,
        uneven_parts,
        leaders_in_turn_in_functions,
        meant_to_be_in_another_order,
        asynchronous_in_other_places,
        groups,
        hooks_of_autograd,
        two_threads,
        training,
    ],
)
def test_legal_programs_pass(checked: Clusters, ranks: int, program: Callable[[], None]) -> None:
    checked(ranks).run(program)


def test_records_do_not_pile_up(checked: Clusters) -> None:
    def many() -> tuple[int, int]:
        from minidist.comm.checking import call_checker

        store = call_checker.checker.watch.store  # type: ignore[union-attr]
        comm.barrier()
        before = store.num_keys()
        for _ in range(100):
            comm.all_reduce(torch.ones(2))
        comm.barrier()
        return before, store.num_keys()

    cluster = checked(3)
    for before, after in cluster.run(many) + cluster.run(many):
        assert after <= before + 12
    assert max(before for before, _ in cluster.run(many)) < 60


# Programs that are wrong.


def other_operation() -> None:
    if md.rank() == 0:
        comm.all_reduce(torch.ones(3))  # one operation
    else:
        comm.broadcast(torch.ones(3))  # another operation


def other_depth() -> None:
    def inner(x: torch.Tensor) -> None:
        if md.rank() == 0:
            comm.all_gather(x)  # nested one
        else:
            comm.reduce_scatter(x)  # nested another

    inner(torch.ones(6))


def other_shape_asynchronously() -> None:
    """Over gloo the process would be aborted, once both have begun."""
    works = [comm.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
    works.append(comm.all_reduce(torch.ones(2 + (md.rank() == 1)), async_op=True))  # under way
    for work in works:
        work.wait()


def other_op_in_a_hook() -> None:
    layer = nn.Linear(3, 3)
    op = "max" if md.rank() == 1 else "sum"
    layer.weight.register_hook(lambda gradient: comm.all_reduce(gradient.clone(), op))  # in a hook
    layer(torch.ones(1, 3)).sum().backward()


OTHER_LINES = {
    other_operation: ("one operation", "another operation"),
    other_depth: ("nested one", "nested another"),
    other_shape_asynchronously: ("under way", "under way"),
    other_op_in_a_hook: ("in a hook", "in a hook"),
}
"""Of programs that are not one line."""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("program", "one", "another"),
    [
        (other_operation, "all_reduce of float32[3] by sum", "broadcast of float32[3] from rank 0"),
        (other_depth, "all_gather of float32[6]", "reduce_scatter of float32[6] by sum"),
        (other_shape_asynchronously, "float32[2] by sum", "float32[3] by sum"),
        (other_op_in_a_hook, "by sum", "by max"),
        (lambda: comm.all_reduce(torch.ones(3 + md.rank() % 2)), "e of float32[3]", "e of float32[4]"),
        (
            lambda: comm.all_reduce(torch.ones(3).to(torch.float64 if md.rank() else torch.float32)),
            "all_reduce of float32[3]",
            "all_reduce of float64[3]",
        ),
        (lambda: comm.all_reduce(torch.ones(3), "max" if md.rank() == 1 else "min"), "by min", "by max"),
        (lambda: comm.broadcast(torch.ones(3), source=md.rank() % 2), "from rank 0", "from rank 1"),
        (
            lambda: comm.all_to_all(
                torch.ones(md.size()), [1] * md.size(), [1 + (md.rank() == 1)] * md.size()
            ),
            "1] out and [1, 1",
            "1] out and [2, 2",
        ),
    ],
)
def test_different_calls_are_both_named_on_all_ranks(
    checked: Clusters, ranks: int, program: Callable[[], None], one: str, another: str
) -> None:
    text = told(checked(ranks), program, begins=program is other_shape_asynchronously)
    first, second = re.fullmatch(
        r"the ranks make different calls: rank \d (.*); rank \d (.*); all ranks of a group have to .*", text
    ).groups()  # type: ignore[union-attr]
    if one not in first:
        first, second = second, first
    assert one in first
    assert another in second
    for number, call in enumerate((first, second)):
        named = OTHER_LINES.get(program)
        line = program.__code__.co_firstlineno if named is None else line_of(named[number])
        assert call.endswith(f" at {__file__}:{line}")


def test_a_time_limit_says_where_everybody_is() -> None:
    def hang() -> None:
        comm.barrier()  # the last call
        if md.rank() == 0:
            comm.all_reduce(torch.ones(3))  # waited for
        else:
            time.sleep(HANG)  # stuck here

    with md.Cluster(2, timeout=3, check=True) as cluster, pytest.raises(md.RankError) as caught:
        cluster.run(hang)
    text = caught.value.summary
    assert isinstance(caught.value.__cause__, comm.CollectiveError)
    assert re.search(r"rank 0 has waited \d\.\d s in all_reduce of float32\[3\]", text)
    assert f"at {__file__}:{line_of('waited for')}, and rank 1 did not come" in text
    assert f"rank 1 is at {__file__}:{line_of('stuck here')}, its last call was barrier" in text
    assert f"at {__file__}:{line_of('the last call')}" in text


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_returned_is_known_at_once(checked: Clusters, ranks: int) -> None:
    def skip() -> str:
        comm.barrier()
        if md.rank() == 1:
            return ""
        begun = time.monotonic()
        try:
            comm.all_reduce(torch.ones(3))  # left alone
        except comm.CollectiveError as error:
            assert time.monotonic() - begun < HANG / 2  # before the time limit
            return str(error)
        return "no error"

    texts = checked(ranks).run(skip)
    assert len({*texts} - {""}) == 1
    assert re.match(
        r"rank 1 returned from its function, its last call was barrier .* waits for it in all_reduce",
        texts[0],
    )
    assert f":{line_of('left alone')}" in texts[0]


def swapped_in_branches() -> None:
    if md.rank() == 0:
        sum_gradients()
        sum_losses()
    else:
        sum_losses()
        sum_gradients()


def swapped_behind_a_helper() -> None:
    def gradients() -> None:
        reduce(torch.ones(10))  # gradients by the helper

    def losses() -> None:
        reduce(torch.ones(10))  # losses by the helper

    for each in (gradients, losses) if md.rank() == 0 else (losses, gradients):
        each()


def swapped_while_under_way() -> None:
    def gradients() -> comm.Work:
        return comm.all_reduce(torch.ones(10), async_op=True)  # gradients under way

    def losses() -> comm.Work:
        return comm.all_reduce(torch.ones(10), async_op=True)  # losses under way

    order = (gradients, losses) if md.rank() == 0 else (losses, gradients)
    for work in [each() for each in order]:
        work.wait()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("program", "places"),
    [
        (swapped_in_branches, ("gradients", "losses")),
        (swapped_behind_a_helper, ("gradients by the helper", "losses by the helper")),
        (swapped_while_under_way, ("gradients under way", "losses under way")),
    ],
)
def test_two_places_in_opposite_order_are_named(
    checked: Clusters, ranks: int, program: Callable[[], None], places: tuple[str, ...]
) -> None:
    text = told(checked(ranks), program, begins=program is swapped_while_under_way)
    call = r"all_reduce of float32\[10\] by sum with ranks [\d, ]+ at (.+?)"
    calls = re.fullmatch(
        rf"the ranks make the same calls in another order: rank (\d) {call}, and then {call}; "
        rf"rank (\d) {call}, and then {call}; make them in one order on all ranks, or put them under "
        r"`with comm\.unordered\(\):` if the order is meant",
        text,
    )
    assert calls is not None, text
    one, first, then, other, late, early = calls.groups()
    assert one != other
    assert (first, then) == (early, late)
    assert first != then
    helper = f"{__file__}:{line_of('helper')}, called at " if program is swapped_behind_a_helper else ""
    assert {first, then} == {f"{helper}{__file__}:{line_of(place)}" for place in places}


def test_calls_on_different_groups_are_a_circle(checked: Clusters) -> None:
    def circle() -> None:
        pair = dist.new_group([0, 1])
        if md.rank() == 0:
            comm.all_reduce(torch.ones(3), group=pair)  # on the pair
        else:
            comm.all_reduce(torch.ones(3))  # on all

    text = told(checked(3), circle)
    assert text.startswith("no rank can go on: rank ")
    assert f"with ranks 0, 1 at {__file__}:{line_of('on the pair')}" in text
    assert f"with ranks 0, 1, 2 at {__file__}:{line_of('on all')}" in text


@pytest.mark.parametrize("wait", [True, False])
def test_a_message_of_another_shape_is_named(checked: Clusters, wait: bool) -> None:
    def exchange() -> None:
        if md.rank() == 0:
            work = comm.send(torch.ones(3), 1, tag=2, async_op=True)  # sent
        else:
            work = comm.recv(torch.ones(4), 0, tag=2, async_op=not wait)  # received
        if not isinstance(work, torch.Tensor):
            work.wait()

    with pytest.raises(md.RankError) as caught:
        checked(2).run(exchange)
    text = str(caught.value.__cause__)
    assert f"send of float32[3] to rank 1 at {__file__}:{line_of('sent')}" in text
    assert f"recv of float32[4] from rank 0 at {__file__}:{line_of('received')}" in text


def test_a_message_that_nobody_sends_is_named() -> None:
    def wait() -> None:
        if md.rank() == 1:
            comm.recv(torch.ones(4), 0)
        elif md.rank() == 0:
            time.sleep(HANG)  # sends nothing

    with md.Cluster(2, timeout=3, check=True) as cluster, pytest.raises(md.RankError) as caught:
        cluster.run(wait)
    assert f"rank 0 is at {__file__}:{line_of('sends nothing')}, it has made no call" in caught.value.summary


def test_lines_of_a_notebooks_cell_are_named(checked: Clusters) -> None:
    text = (
        "def first(): comm.all_reduce(torch.ones(3))\n"
        "def second(): comm.all_reduce(torch.ones(3))\n"
        "def swap():\n"
        "    for each in (first, second) if md.rank() == 0 else (second, first):\n"
        "        each()\n"
    )
    names: dict[str, Any] = {"torch": torch, "md": md, "comm": comm, "__name__": "__main__"}
    exec(compile(text, "<cell 7>", "exec"), names)
    message = told(checked(2), names["swap"])
    assert "in another order" in message
    assert message.count("at <cell 7>:1") == message.count("at <cell 7>:2") == 2


def test_launch_takes_the_flag() -> None:
    def check() -> bool:
        from minidist.comm.checking import call_checker

        return call_checker.checker is not None

    assert md.launch(check, 2, check=True) == [True, True]
    assert md.launch(check, 2) == [False, False]
    with pytest.raises(TypeError, match="check is 1; give True or False"):
        md.Cluster(2, check=1)  # type: ignore[arg-type]


def test_a_launchers_ranks_check_too(tmp_path: Path) -> None:
    """With torchrun's variables. The script starts the ranks itself: torch is imported once."""
    program = """
        import os, socket, sys
        import torch
        import minidist as md
        from minidist import comm

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        child = os.fork()  # before there are threads
        os.environ.update(
            TORCHELASTIC_RUN_ID="7", RANK="0" if child else "1", WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )

        def same():
            return comm.all_reduce(torch.ones(2)).tolist()

        md.init(timeout=30, check=True)
        assert md.launch(same, 2, check=True) == [[2.0, 2.0]] * 2
        assert md.launch(same, 2) == [[2.0, 2.0]] * 2
        comm.barrier()
        try:
            comm.broadcast(torch.ones(2), source=md.rank())  # line 23
        except comm.CollectiveError as error:
            print(f"rank {md.rank()}: {error}", flush=True)
        md.shutdown()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    done = run_script(tmp_path, program)
    assert done.returncode == 0, done.stderr
    # The two processes' lines may run into each other.
    texts = re.findall(r"rank \d: (the ranks make different calls: .*?in the same order)", done.stdout)
    assert len(texts) == 2, done.stdout
    assert texts[0] == texts[1]
    assert texts[0].count(f"{tmp_path / 'program.py'}:23") == 2


@pytest.mark.deep
def test_a_rank_that_leaves_torchruns_world_is_known(tmp_path: Path) -> None:
    program = """
        import torch, minidist as md
        from minidist import comm

        md.init(timeout=40, check=True)
        if md.rank() == 0:
            try:
                comm.all_reduce(torch.ones(2))
            except comm.CollectiveError as error:
                print(error, flush=True)
    """
    done = torchrun(tmp_path, program)
    assert "rank 1 left the world, it has made no call, and rank 0 waits for it in all_reduce" in done.stdout


@pytest.mark.parametrize("asynchronous", [False, True])
def test_later_calls_raise_a_caught_mismatch_again(asynchronous: bool) -> None:
    """Else they would meet the call that another rank has begun, and gloo would abort a rank."""

    def train() -> set[str]:
        said = set()
        for count in (2 + 1000 * md.rank(), 5, 5):
            try:
                done = comm.all_reduce(torch.ones(count), async_op=asynchronous or count != 5)
                said.add(str(done.wait() if isinstance(done, comm.Work) else done))
            except md.CollectiveError as error:
                said.add(str(error))
        return said

    (one,), (other,) = md.launch(train, 2, timeout=HANG, check=True)
    assert one == other
    assert all(f"float32[{count}]" in one for count in (2, 1002)), one
