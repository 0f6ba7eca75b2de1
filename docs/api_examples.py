"""Examples for the API reference, each under its name's path. Tests run each on two ranks.

Each begins from these imports, and asserts what it says. docs/reference.py shows them below the docstrings.
"""

# ruff: noqa: E402
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.model import MLP

# minidist.comm.all_reduce
x = torch.tensor([1.0, 10.0]) * (md.rank() + 1)
comm.all_reduce(x)  # in place, on every rank
assert x.tolist() == [3.0, 30.0]

# minidist.comm.reduce_scatter
x = torch.tensor([1.0, 10.0]) * (md.rank() + 1)
part = comm.reduce_scatter(x)  # rank r gets part r of the sum
assert part.tolist() == [[3.0], [30.0]][md.rank()]

# minidist.comm.all_gather
parts = comm.all_gather(torch.tensor([float(md.rank())]))
assert parts.tolist() == [0.0, 1.0]

# minidist.comm.all_to_all
x = torch.tensor([0.0, 1.0]) + 10 * md.rank()  # element i is for rank i
assert comm.all_to_all(x).tolist() == [[0.0, 10.0], [1.0, 11.0]][md.rank()]

# minidist.comm.broadcast
x = torch.full((3,), float(md.rank()))
comm.broadcast(x, source=1)
assert x.tolist() == [1.0, 1.0, 1.0]

# minidist.comm.gather
rows = comm.gather(torch.tensor([float(md.rank())]), destination=0)
assert rows is None if md.rank() else rows.tolist() == [0.0, 1.0]

# minidist.comm.scatter
mine = torch.empty(1)
comm.scatter(torch.tensor([5.0, 6.0]) if md.rank() == 0 else None, mine)
assert mine.item() == 5.0 + md.rank()

# minidist.comm.send
if md.rank() == 0:
    comm.send(torch.arange(3.0), destination=1)
else:
    assert comm.recv(torch.empty(3), source=0).tolist() == [0.0, 1.0, 2.0]

# minidist.comm.recv
other = 1 - md.rank()
work = comm.send(torch.tensor([float(md.rank())]), other, async_op=True)  # else each would wait for the other
arrived = comm.recv(torch.empty(1), other)
work.wait()
assert arrived.item() == other

# minidist.comm.Work
x = torch.ones(4)
work = comm.all_reduce(x, async_op=True)  # returns at once
work.wait()
assert x.tolist() == [2.0] * 4

# minidist.comm.barrier
comm.barrier()  # no rank goes on before all have come here

# minidist.comm.ledger
with comm.ledger() as ledger:
    comm.all_reduce(torch.ones(1000), algorithm="ring")
assert sum(call.bytes_sent for call in ledger.calls) == 2 * 1 / 2 * 4000  # 2 (n - 1) / n S

# minidist.comm.Ledger
with comm.ledger() as ledger:
    comm.broadcast(torch.ones(10))
assert [call.name for call in ledger.calls] == ["broadcast"]

# minidist.comm.rank
assert comm.rank() in range(comm.size())

# minidist.comm.size
assert comm.size() == 2

# minidist.DataParallel
model = md.DataParallel(nn.Linear(2, 1))  # begins with rank 0's parameters
inputs = torch.randn(4, 2)  # this rank's rows
model(inputs).mean().backward()
model.synchronize()  # gradients are now the mean over all rows
mean = comm.all_reduce(inputs.mean(0), op="mean")
torch.testing.assert_close(model.module.weight.grad[0], mean)

# minidist.ZeroOptimizer
model = md.DataParallel(nn.Linear(8, 8)).module
optimizer = md.ZeroOptimizer(model.parameters(), torch.optim.Adam, stage=1, lr=0.1)
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()  # each rank updates half, and all get the whole
md.assert_in_sync(model)

# minidist.FullyShard
sharded = md.FullyShard(MLP((8, 16, 4)), torch.optim.Adam, lr=0.1)
loss = md.cross_entropy(sharded(torch.randn(6, 8)), torch.randint(4, (6,)))
loss.backward()
sharded.step()
sharded.zero_grad()
assert loss.isfinite()

# minidist.LocalSGD
model = md.LocalSGD(nn.Linear(2, 1), every=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).mean().backward()
    optimizer.step()
    model.synchronize()  # averages parameters at every second step
md.assert_in_sync(model.module)

# minidist.Coordinator
if md.rank() == 0:  # any process will do; the workers need no world
    coordinator = md.Coordinator(nn.Linear(2, 1), workers=1)
    with ThreadPoolExecutor() as pool:
        log = pool.submit(coordinator.serve, outer_steps=1)
        model = md.LocalSGD(nn.Linear(2, 1), every=2, coordinator=coordinator.address)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while model.outer_steps < 1:
            optimizer.zero_grad()
            model(torch.randn(4, 2)).mean().backward()
            optimizer.step()
            model.synchronize()
        model.leave()
        assert log.result() == [{0: 0}]  # worker 0 in slot 0

# minidist.nesterov
model = md.LocalSGD(nn.Linear(2, 1), every=2, outer=md.nesterov)  # DiLoCo

# minidist.ParameterServer
model = nn.Linear(2, 1)
server = md.ParameterServer(model, partial(torch.optim.SGD, lr=0.1), servers=1)
if server.is_server:
    server.serve()
else:
    server.pull()
    model(torch.randn(4, 2)).mean().backward()
    server.push(rows=4)
    server.done()

# minidist.Pipeline
torch.manual_seed(0)
stages = nn.Linear(8, 16), nn.Linear(16, 4)
pipeline = md.Pipeline(stages[md.rank()], schedule="1f1b", micro_batches=4)
loss = pipeline.step(torch.randn(8, 8), torch.randint(4, (8,)))  # fills .grad
assert stages[md.rank()].weight.grad.isfinite().all()

# minidist.LayerByLayer
torch.manual_seed(0)
layers = nn.Linear(8, 16), nn.Linear(16, 4)
parallel = md.LayerByLayer(layers[md.rank()])
loss = parallel.step(torch.randn(8, 8), torch.randint(4, (8,)))
assert layers[md.rank()].weight.grad.isfinite().all()

# minidist.ColumnParallelLinear
up = md.ColumnParallelLinear(8, 16)  # each rank has 8 of the 16 outputs
down = md.RowParallelLinear(16, 8)  # takes them, and adds up over the ranks
x = comm.broadcast(torch.randn(3, 8))
assert up(x).shape == (3, 8)
assert down(up(x)).shape == (3, 8)

# minidist.RowParallelLinear
layer = md.RowParallelLinear(4, 2, input_is_parallel=False)  # cuts a whole input itself
y = layer(torch.ones(1, 4))
torch.testing.assert_close(comm.all_reduce(y.detach().clone(), op="mean"), y.detach())  # the same on both

# minidist.VocabParallelEmbedding
table = md.VocabParallelEmbedding(10, 4)  # each rank has 5 of the 10 rows
assert table(torch.tensor([0, 9])).shape == (2, 4)

# minidist.vocab_parallel_cross_entropy
torch.manual_seed(0)
logits, targets = torch.randn(3, 6), torch.tensor([0, 3, 5])
mine = logits[:, 3 * md.rank() : 3 * md.rank() + 3]  # this rank's half of the vocabulary
loss = md.vocab_parallel_cross_entropy(mine, targets)
torch.testing.assert_close(loss.mean(), md.cross_entropy(logits, targets))

# minidist.prepare
engine = md.prepare(MLP((8, 16, 4)), partial(torch.optim.AdamW, lr=1e-3), md.Layout(dp=2, zero=1))
loss = engine.step(torch.randn(6, 8), torch.randint(4, (6,)))  # this rank's rows
assert loss == loss  # a number, the mean over all rows of both ranks

# minidist.Engine
engine = md.prepare(MLP((8, 16, 4)), partial(torch.optim.SGD, lr=0.1), md.Layout(dp=2))
before = engine.evaluate(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))
for _ in range(3):
    engine.step(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))
assert engine.evaluate(torch.ones(2, 8), torch.zeros(2, dtype=torch.long)) < before
assert engine.memory().parameters > 0

# minidist.compare
torch.manual_seed(0)
optimizer = partial(torch.optim.SGD, lr=0.1)
engines = [md.prepare(MLP((8, 16, 4), seed=0), optimizer, md.Layout(dp=2, zero=zero)) for zero in (0, 1)]
found = md.compare(*engines, [(torch.randn(4, 8), torch.randint(4, (4,)))])
print(found)  # the first step and parameter that differ, if any does

# minidist.assert_in_sync
model = nn.Linear(2, 2)
for parameter in model.parameters():
    comm.broadcast(parameter.data)
md.assert_in_sync(model)  # raises OutOfSync and names the first tensor that differs

# minidist.PowerSGD
model = md.DataParallel(nn.Linear(8, 8), compression=md.PowerSGD(rank=2))
model(torch.randn(4, 8)).square().mean().backward()
model.synchronize()
md.assert_in_sync(model.module, gradients=True)

# minidist.TopK
model = md.DataParallel(nn.Linear(8, 8), compression=md.TopK(ratio=0.1))
model(torch.randn(4, 8)).square().mean().backward()
model.synchronize()
md.assert_in_sync(model.module, gradients=True)

# minidist.cross_entropy
loss = md.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
torch.testing.assert_close(loss, torch.tensor(4.0).log())

# minidist.kernels.rung
from minidist.kernels import rung

a, b = torch.randn(40, 30).numpy(), torch.randn(30, 50).numpy()
torch.testing.assert_close(torch.from_numpy(rung("s6_register_tile").matmul(a, b)), torch.from_numpy(a @ b))

# minidist.kernels.CPU_LADDER
from minidist.kernels import CPU_LADDER

assert [each.number for each in CPU_LADDER][:3] == [1, 2, 3]
assert CPU_LADDER[0].idea.startswith("Three Python loops")

# minidist.kernels.ATTENTION_LADDER
from minidist.kernels import ATTENTION_LADDER

q, k, v = torch.randn(3, 2, 50, 16).numpy()  # two heads of 50 positions
out, logs = ATTENTION_LADDER[-1].forward(q, k, v, causal=True)
expected = nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), is_causal=True)
torch.testing.assert_close(torch.from_numpy(out), expected)
dq, dk, dv = ATTENTION_LADDER[-1].backward(q, k, v, out, logs, out, causal=True)

# minidist.kernels.Rung
from minidist.kernels import rung

first = rung(1)
assert (first.name, first.device) == ("s1_python_loops", "cpu")
