"""FullyShard: a loop of one's own, memory, models made on meta, what lies on disk, and mistakes told."""

from __future__ import annotations

import copy
import gc
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.model import GPT, config
from minidist.parallel.contract.residency import ZERO_3
from minidist.parallel.sharding.optimizer import memory_source as shard_offload
from minidist.parallel.sharding.share_model import share_model
from minidist.parallel.sharding.units import collective_order, cut_into_units, sharded_parameters
from minidist.parallel.sharding.units import units as shard_units
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.activations import Live
from tests.helpers.on_ranks import on_ranks
from tests.parallel.sharding.cases import (
    CASES,
    SGD,
    Skipping,
    check_loop,
    in_groups,
    storage_bytes,
    untied,
    vectors,
)

# A loop of one's own.


class Headed(nn.Module):
    """A body and a head, which has the embedding's weight or one of its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, hidden_only: bool = False) -> Tensor:
        hidden = torch.tanh(self.body(self.embed(tokens)))
        return hidden if hidden_only else self.head(hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_a_unit_works_by_itself(cluster_of: Clusters, tied: bool) -> None:
    """A head takes the activations in chunks, each with a backward pass of its own, as long losses do."""

    def loop(model: Any, optimizer: Any, rank: int, size: int) -> list[float]:
        head, found = getattr(model, "module", model).head, []
        for step in range(3):
            tokens = ((torch.arange(12).view(6, 2) * (step + 2) + step) % 9)[rank::size]
            hidden, total, grads = model(tokens, hidden_only=True), torch.zeros(()).double(), []
            for chunk in hidden.detach().chunk(3):
                chunk.requires_grad_()
                loss = head(chunk).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
                assert chunk.grad is not None
                grads.append(chunk.grad)
            hidden.backward(torch.cat(grads))
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(comm.all_reduce(total, "mean")))
            with torch.no_grad():
                if not tied:  # tied, it is a part of the root unit's
                    found += head(torch.ones(2, 4, dtype=torch.float64)).flatten().tolist()
        return found

    make, units = partial(torch.optim.SGD, lr=0.5), [nn.Embedding, nn.Linear]
    check_loop(cluster_of(2), lambda _: Headed(tied).double(), loop, make, units=units)


def test_a_unit_by_itself_that_failed_leaves_nothing() -> None:
    model = Headed(False)
    sharded = md.FullyShard(model, torch.optim.SGD, units=[model.body, model.head], lr=0.5)
    for wrong in (torch.ones(2, 3), torch.ones(2, 5)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.head(wrong)
    assert model.body(torch.ones(2, 4)).isfinite().all()
    assert model.head(torch.ones(2, 4)).isfinite().all()
    assert sharded(torch.zeros(2, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("of_a_library", [False, True])
def test_a_unit_that_is_used_and_never_called_is_named(of_a_library: bool) -> None:
    """A library's own class of parameters stays what it is, and its values are NaN while it is freed."""

    class Quantized(nn.Parameter):
        pass

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.last = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2)
            if of_a_library:
                self.part[0].weight, self.part[0].bias = (Quantized(p) for p in self.part.parameters())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.part[0](x))

    model, message = Around(), r"part\.0\.weight has no values now.* that is never called"
    if of_a_library:
        message = "outputs are NaN, and the unit part was never called"
    sharded = md.FullyShard(model, torch.optim.SGD, units=[model.part], lr=0.5)
    with pytest.raises(RuntimeError, match=message):
        sharded(torch.ones(2, 3))


def test_named_shards_say_where_each_element_is(cluster_of: Clusters) -> None:
    """Those of all ranks together are the parameters, also frozen ones, each element once."""

    def shards() -> tuple[list[tuple[str, range, torch.Tensor]], dict[str, torch.Tensor]]:
        model = untied(0)
        model.layers[1].requires_grad_(False)
        sharded = md.FullyShard(model, SGD)
        return [*sharded.named_shards()], sharded.state_dict()

    (one, whole), (two, _) = cluster_of(2).run(shards)
    assert len(one) > 1 < len(two)
    found = {name: torch.full((value.numel(),), torch.nan).to(value) for name, value in whole.items()}
    for name, at, part in [*one, *two]:
        assert found[name][at].isnan().all()
        found[name][at] = part
    assert all(torch.equal(found[name], value.flatten()) for name, value in whole.items())


def test_what_it_cannot_do_it_says() -> None:
    sharded = md.FullyShard(nn.Linear(2, 2), torch.optim.SGD)
    with pytest.raises(TypeError, match="cannot be moved or converted; do it to the module before"):
        sharded.double()
    with pytest.raises(TypeError, match="cannot be copied or pickled; save its state_dict"):
        copy.deepcopy(sharded)
    with pytest.raises(TypeError, match="module is a function; give"):
        md.FullyShard(lambda x: x, torch.optim.SGD)  # type: ignore[arg-type]


def test_an_error_in_a_pass_leaves_nothing_behind(cluster_of: Clusters) -> None:
    class Failing(nn.Module):
        fail = ""

        def forward(self, x: Tensor) -> Tensor:
            if self.fail == "forward":
                raise ArithmeticError("planted")
            if self.fail == "backward":
                x.register_hook(self.raising)  # type: ignore[no-untyped-call]
            return x

        def raising(self, _: Tensor) -> None:
            raise ArithmeticError("planted")

    def train(fails: bool, reads: bool) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        failing = Failing()
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), failing, nn.Linear(6, 3)).double()
        sharded = md.FullyShard(model, SGD)
        x, y = vectors(torch.Generator().manual_seed(md.rank()), 4)
        held = 0
        for failing.fail in ("", "forward", "backward", "") if fails else ("", ""):
            sharded.zero_grad()
            before = sharded.state_dict()
            try:
                nn.functional.cross_entropy(sharded(x), y).backward()
            except ArithmeticError:
                if failing.fail == "forward":
                    held += sum(b.values.flat.untyped_storage().nbytes() for b in sharded.shared.buckets)
                if reads:  # as a script that saves its model before it ends
                    torch.testing.assert_close(sharded.state_dict(), before, rtol=0, atol=0)
                continue
            sharded.step()
        return sharded.state_dict(), held

    (wanted, _), *_ = cluster_of(2).run(train, False, False)
    for state, held in cluster_of(2).run(train, True, False) + cluster_of(2).run(train, True, True):
        assert held == 0
        torch.testing.assert_close(state, wanted, rtol=0, atol=0)


# Bytes and memory.


WIDE = config("byte-tiny", vocabulary=16, context=8, layers=12, heads=2, width=32, tied=False)


@on_ranks(4, ahead=[False, True])
def test_a_rank_holds_an_nth_and_in_a_step_a_few_units_more(ahead: bool) -> None:
    strategy = share_model(GPT(WIDE, seed=0), contract.ADAMW, ZERO_3, {"prefetch": ahead})
    units, buckets = strategy.units, strategy.buckets
    gathered: list[int] = []

    def now(*_: Any) -> None:
        gathered.append(sum(bucket.values.flat.untyped_storage().nbytes() for bucket in buckets))

    for part in units[0].module.modules():
        part.register_forward_hook(now)
        part.register_full_backward_hook(now)
    tokens = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        strategy.zero_grad()
        outputs = strategy.forward(tokens[:, :-1])
        nn.functional.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        strategy.synchronize()
        strategy.update()
    gc.collect()
    held = strategy.held()
    unit = max(bucket.layout.length for bucket in buckets) * 4
    whole = 4 * sum(p.numel() for p in units[0].module.parameters())
    assert storage_bytes(held.parameters) == pytest.approx(whole / 4, rel=0.01)
    # And the buffers to reduce in.
    assert storage_bytes(held.gradients) == pytest.approx(whole / 4 + 2 * unit, rel=0.01)
    assert storage_bytes(held.optimizer) == pytest.approx(2 * whole / 4, rel=0.01)
    assert max(gathered) == (1 + ahead) * unit < whole / 4


@on_ranks(2, 4)
def test_a_model_made_on_meta_is_never_whole() -> None:
    more = []

    def built(*arguments: Any) -> Any:
        units = cut_into_units.build(*arguments)
        more.append(live.most - live.now)
        return units

    with Live() as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_parameters, "build", built)
        sharded = md.FullyShard(GPT(WIDE, seed=5, device="meta"), torch.optim.SGD)
    torch.testing.assert_close(sharded.state_dict(), GPT(WIDE, seed=5).state_dict(), rtol=0, atol=0)
    unit = max(4 * bucket.layout.length for bucket in sharded.shared.buckets)
    # The unit's parameters and their flat tensor, the values of one as they are drawn, in float64.
    assert unit < more[0] < 3 * unit
    assert live.most - live.now < 3 * unit


class Head(nn.Module):
    """A table, and a head with a bias and the table's weight, one of them first."""

    def __init__(self, head_first: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.begun: list[str] = []
        table, head = nn.Embedding(7, 4), nn.Linear(4, 7)
        if head_first:
            self.layers = nn.ModuleList([head, nn.Linear(4, 4), table])
            table.weight = head.weight
        else:
            self.layers = nn.ModuleList([table, nn.Linear(4, 4), head])
            head.weight = table.weight

    def initialize_part(self, part: nn.Module) -> None:
        name = next(name for name, module in self.named_modules() if module is part)
        self.begun.append(name)
        for attribute, parameter in part.named_parameters(recurse=False):
            assert parameter.is_contiguous()
            torch.manual_seed(10 * int(name[-1]) + len(attribute))
            nn.init.normal_(parameter)


@on_ranks(2, head_first=[False, True], by_itself=[False, True])
def test_a_tied_head_with_a_bias_begins_once(head_first: bool, by_itself: bool) -> None:
    with torch.device("meta"):
        model = Head(head_first)
    if by_itself:
        model.initialize_part = None  # type: ignore[assignment, method-assign]
    state = md.FullyShard(model, SGD).state_dict()
    weight = state["layers.0.weight"]
    torch.testing.assert_close(weight, state["layers.2.weight"], rtol=0, atol=0)
    if by_itself:  # a table's are normal; a head's, and its bias, are at most 1 / sqrt(4)
        assert (weight.abs().max() <= 0.5) == head_first
        assert 0 < state[f"layers.{2 - 2 * head_first}.bias"].abs().max() <= 0.5
        return
    wanted = Head(head_first)
    for part in reversed(wanted.layers):  # the first holder writes last
        wanted.initialize_part(part)
    assert sorted(model.begun) == ["layers.0", "layers.1", "layers.2"][: 3 - head_first]
    torch.testing.assert_close(state, wanted.state_dict(), rtol=0, atol=0)


# Offload.


def test_an_engine_offloads_too(cluster_of: Clusters, tmp_path: Path) -> None:
    contract.check(cluster_of, CASES["gpt"], "dp=2,zero=3", fully_shard={"offload": str(tmp_path)})


def test_an_optimizer_steps_on_slices_of_what_lies_on_disk(cluster_of: Clusters, tmp_path: Path) -> None:
    """Of 7 elements each; in memory is the state of one slice, and saved state is loaded into slices."""
    case = replace(CASES["unused"], optimizer=in_groups, batches=(12, 13, 7, 12))
    batches = case.global_batches()
    options = {"offload": str(tmp_path)}

    def train(first: bool) -> tuple[contract.Trained, list[int], bool]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_offload, "SLICE", 7 * 8)
            model = case.model(md.rank() + (not first) * 5)
            engine = md.prepare(model, case.optimizer, md.Layout(dp=md.size(), zero=3), fully_shard=options)
        parallel = engine.strategy  # type: ignore[attr-defined]
        moved: list[int] = []
        mapped = parallel.slices.memory._mapped

        def made(optimizer: Any, *_: Any) -> None:
            state = [v for each in optimizer.state.values() for v in each.values() if v.dim()]
            moved.append(sum(v.nbytes for v in state if v.untyped_storage().data_ptr() not in mapped))

        parallel.optimizer.register_step_post_hook(made)
        if not first:
            md.load(engine, str(tmp_path / "saved"))
        trained = contract.steps(engine, batches[:3] if first else batches[3:])
        if first:
            md.save(engine, str(tmp_path / "saved"))
        sums = [bucket.gradients.reduced.untyped_storage().data_ptr() for bucket in parallel.buckets]
        on_disk = all(address in mapped for address in sums)
        return trained, moved, on_disk

    expected = contract.train_in_one_process(case)
    for trained, moved, on_disk in cluster_of(2).run(train, True):
        torch.testing.assert_close(trained.losses, expected.losses[:3])
        assert max(moved) == 2 * 7 * 8
        assert on_disk
    for trained, moved, _ in cluster_of(3).run(train, False):
        contract.compare(trained, contract.Trained(expected.losses[3:], expected.state))
        assert not any(moved)


def test_offload_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="offload is True; give False, 'cpu' or a directory"):
        md.FullyShard(model, torch.optim.SGD, offload=True)
    with pytest.raises(OSError, match=r"offload to .*nowhere needs .* bytes there.*No such file"):
        md.FullyShard(model, torch.optim.SGD, offload=tmp_path / "nowhere")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device'; give a directory with room"):
        md.FullyShard(model, torch.optim.SGD, offload=tmp_path)
    assert [*tmp_path.iterdir()] == []
    assert not model.weight.isnan().any()


# What needs no second rank.


def test_units_are_the_children_of_lists_unless_told() -> None:
    model = Skipping()

    def names(units: Any = None) -> list[str]:
        return [name for name, _ in cut_into_units.modules_of(model, units)]

    assert names() == ["", "layers.0", "layers.1.0", "layers.1.2", "layers.2"]
    assert names([nn.Linear]) == ["", "layers.0", "layers.1.0", "layers.1.2", "layers.2", "last"]
    assert names([model.layers[1]]) == ["", "layers.1"]
    with pytest.raises(TypeError, match="units has 'Linear'; give classes of modules, or modules"):
        names(["Linear"])
    with pytest.raises(ValueError, match="units has a Linear that is no part of the model"):
        names([nn.Linear(1, 1)])


def test_a_backward_pass_gathers_the_next_unit_while_one_computes() -> None:
    units = [shard_units.Unit(name, nn.Module(), i) for i, name in enumerate(("", "a", "b", "c"))]
    for at, unit in enumerate(units):  # the forward pass called one after the other
        unit.first, unit.last, unit.calls = 2 * at, 2 * at + 1, 1
    said = {
        ahead: [
            f"{kind} {unit.name}" for kind, unit in collective_order.backward_order(units, units[:1], ahead)
        ]
        for ahead in (True, False)
    }
    assert said[True] == ["gather c", "gather b", "reduce c", "gather a", "reduce b", "reduce a"]
    assert said[False] == ["gather c", "reduce c", "gather b", "reduce b", "gather a", "reduce a"]


@pytest.mark.parametrize("synchronized", [False, True])
def test_another_optimizer_may_not_step_on_the_shards(synchronized: bool) -> None:
    sharded = md.FullyShard(nn.Linear(2, 2), SGD)
    other = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(torch.ones(1, 2)).sum().backward()
    if synchronized:
        sharded.synchronize()
    with pytest.raises(RuntimeError, match="SGD was to step on the shards of a FullyShard, whose gradients"):
        other.step()
    sharded.step()
    torch.optim.SGD([torch.zeros(1)]).step()  # of somebody else's parameters


def test_parameters_cannot_be_summoned_inside_a_pass() -> None:
    class Peeking(nn.Module):
        owner: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.owner is not None:
                with self.owner[0].summon():
                    pass
            return x

    model = nn.Sequential(nn.Linear(2, 2), Peeking())
    sharded = md.FullyShard(model, torch.optim.SGD)
    model[1].owner = [sharded]
    with pytest.raises(RuntimeError, match="before or after a pass, and not inside it"):
        sharded(torch.ones(1, 2))
