# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. A network on your own matmul
#
# **Time:** about 2 hours. **Builds on:** lesson 01.
#
# You have built fast matrix products. Here you use them to build a network of two layers that learns to read
# digits, forward and backward. Every product runs on the rung of the ladder that you choose. There is no
# autograd and no ready-made layer: in the end you have written everything between the pixels and the answer.

# %%
import time
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from checks.figures import BLUE, GREEN, ORANGE, RED, draw, ladder, name, show
from checks.pictures.digit_pictures import digit_pictures
from checks.pictures.epochs import epochs_picture
from checks.pictures.there_and_back import there_and_back
from checks.your_own_network import check, hint, or_solution
from minidist.kernels import rung
from minidist.kernels.cuda.runtime.device import backend
from minidist.model import MLP, digits
from minidist.model.matmul import Linear

threadpool_limits(1)  # one core, NumPy's library too
ladder(7)

# %% [markdown]
# **The question.** What else does a network do besides multiplying matrices? And how much faster does it get if
# you make the products ten times as fast?
#
# ## What is to be learned
#
# The data are 1797 handwritten digits of 8 x 8 pixels, as rows of 64 numbers from 0 (paper) to 1 (ink). One
# digit in five is held out. The network never learns from these, so they show what it has understood.

# %%
data = digits()
x, y = data.train.inputs.numpy(), data.train.targets.numpy()
test_x, test_y = data.test.inputs.numpy(), data.test.targets.numpy()
digit_pictures(x[:9], [str(digit) for digit in y[:9]], "What is to be read.")
print(f"{len(x)} to learn from, {len(test_x)} held out")

# %% [markdown]
# ## Choose your matmul
#
# Use any function that returns the product of two matrices: a rung of minidist's ladder, by its name (from
# `s1_python_loops` to `s7_threads`), or one of your own. To use yours from lesson 1, write a function that
# makes an empty `c`, calls `compiled_rows(a, b, c)`, and returns `c`. Change the cell below, and run everything
# again.

# %%
matmul = rung("s6_register_tile").matmul
matmul(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]]))  # the first call compiles

# %% [markdown]
# ## Forward
#
# A **linear layer** multiplies its rows by a matrix of **weights** and adds a **bias**: `y = x w + b`. With m
# rows of k numbers, `w` is k x n, `b` has n numbers, and `y` is m x n. Between two such layers stands a
# **ReLU**: max(0, y), element by element. (Without it, two linear layers would do no more than a single one,
# because `(x w1) w2 = x (w1 w2)`.) The second layer gives ten numbers for each row, the **logits**. The larger
# number d is, the surer the network is that the digit is a d. The 128 columns in the middle are called
# **units**.


# %%
def new_network(sizes=(64, 128, 10), scale=1.0, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    parameters = []
    for k, n in pairwise(sizes):
        w = rng.standard_normal((k, n)) * np.sqrt(2 / k) * scale
        parameters += [w.astype(dtype), np.zeros(n, dtype)]
    return parameters


def forward(parameters, x, matmul):
    w1, b1, w2, b2 = parameters
    hidden = matmul(x, w1) + b1  # (rows, 128)
    return hidden, matmul(np.maximum(hidden, 0), w2) + b2  # (rows, 10): logits


def accuracy(parameters, x, y):
    _, logits = forward(parameters, x, matmul)
    return (logits.argmax(axis=1) == y).mean()


f"{accuracy(new_network(), test_x, test_y):.0%} right before anything is learned"

# %% [markdown]
# ## Which way is down?
#
# Learning needs one number that says how bad the answers are: the **loss**. Its **gradient** says for every
# weight how much the loss changes when that weight changes a little. If you move the weights against the
# gradient, the loss falls. The simplest way to find the gradient is to *try*: move a weight a little up and a
# little down, and look at the loss. For a loss f of one number x, the slope is (f(x + h) - f(x - h)) / 2h. With
# *both* sides the error shrinks with h². With one side it shrinks only with h.
#
# **Exercise 7.1: numerical_gradient.** `loss()` takes no argument: it computes with what is in the array `x`
# now. Change one element of `x` at a time, by h up and down, and return the slopes in an array like `x`.
# Afterwards `x` has to be as it was, to the last bit. (`np.ndindex(x.shape)` goes through all indices, and
# `x[i]` is the element at index i. If `x` is empty, there are none.)
#
# Par: two calls of `loss` for each element.


# %% tags=["exercise"]
def numerical_gradient(loss, x, h=1e-5):
    """How much loss() changes with each element of x."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        before = x[i]
        ...  # about 6 lines
    return gradient


# %%
check(numerical_gradient)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
numerical_gradient = or_solution(numerical_gradient)
numbers = np.array([1.0, 2.0, 3.0])
numerical_gradient(lambda: (numbers**2).sum(), numbers)

# %% [markdown]
# That is 2x, as it should be. This method needs no mathematics, but it is far too slow for training: this
# network has 9610 parameters, so one gradient takes 19 220 forward passes. We keep it as the *judge* of a
# faster method.
#
# ## Backward
#
# **Backpropagation** finds all slopes in one walk back (Rumelhart, Hinton and Williams 1986). Each operation
# gets `g`, the gradient of the loss with respect to its *result*: how much the loss changes with each element of
# the result. It returns the gradient with respect to its *inputs*. (For short: the gradient *of* them.) No
# operation needs to know what comes after it: `g` contains all of that. The question is always the same: if this
# input rises a little, how much does the result change, and how much does the loss change then?
#
# Press Play, or go step by step, and look at the shapes.

# %%
there_and_back()

# %% [markdown]
# **Exercise 7.2: relu_backward.** The forward pass was `np.maximum(x, 0)`. `g` has the same shape, and is the
# gradient of its result. Return the gradient of `x`. Where `x` is exactly 0, let the slope be 0.


# %% tags=["exercise"]
def relu_backward(x, g):
    """Gradient of x in max(x, 0), from the gradient g of its result."""
    ...  # 1 line


# %%
check(relu_backward)

# %%
relu_backward = or_solution(relu_backward)
relu_backward(np.array([-2.0, -1.0, 1.0, 2.0]), np.array([0.1, 0.2, 0.3, 0.4]))

# %% [markdown]
# Now the linear layer. Element (i, j) of y is the sum over p of `x[i, p] * w[p, j]`, plus `b[j]`. How much does
# the loss change with `w[p, j]`? *Every row* i uses that weight, and multiplies it by `x[i, p]`. So its
# gradient is the sum over the rows i of `x[i, p] * g[i, j]`. Look at that sum again: it is an element of a
# matrix product. Which one? The same steps lead to the gradient of x.
#
# | | shape |
# |---|---|
# | `x`, and the gradient of it | m x k |
# | `w`, and the gradient of it | k x n |
# | `y`, and `g` | m x n |
# | `b`, and the gradient of it | n |
#
# **Exercise 7.3: linear_backward.** Return three gradients: of `x`, of `w` and of `b`. Use `matmul(a, b)` for
# both products; it also takes transposed views such as `w.T`. There may be 0 rows.
#
# Par: 2 products, each with as many FLOPs as the forward product.


# %% tags=["exercise"]
def linear_backward(x, w, g, matmul):
    """Gradients of x, w and b in y = x w + b, from the gradient g of y."""
    ...  # about 4 lines


# %%
check(linear_backward)

# %%
linear_backward = or_solution(linear_backward)
a, b, g = np.ones((4, 3)), np.ones((3, 2)), np.ones((4, 2))
[gradient.shape for gradient in linear_backward(a, b, g, matmul)]

# %% [markdown]
# So a layer takes three products of the same size: one forward, two backward. They are nearly all the work of
# training. That is why this course began with them.
#
# ## The loss
#
# The **softmax** turns ten logits into ten probabilities: exp makes all of them positive, and the division by
# their sum makes them add up to 1. The loss of a row is -log of the probability of the right digit. This is the
# **cross-entropy**: 0 for a network that is sure and right, large for one that is sure and wrong. A pure guess
# among ten digits costs log 10 = 2.3.
#
# If you compute it in just this way, it breaks:

# %%
with np.errstate(all="ignore"):
    logits = np.array([100.0, 0.0], np.float32)
    print(np.exp(logits), np.exp(logits) / np.exp(logits).sum())

# %% [markdown]
# exp(100) is larger than any float32, so it becomes infinity. Infinity divided by infinity is **NaN**, not a
# number. One NaN in the loss makes every gradient NaN, and after one step every weight. The remedy is exact:
# softmax does not change if you subtract the same number from all logits of a row. Subtract the row's largest
# logit. Then the largest exp is 1 and the sum is at least 1, and neither the sum nor its log can go wrong:
#
# -log softmax(z)[t] = log(sum of exp(z - max z)) - (z[t] - max z)
#
# The gradient of the logits is simple and worth remembering: **the probabilities, minus 1 at the right digit**.
# For the mean over m rows, divide all of it by m.
#
# **Exercise 7.4: softmax_cross_entropy.** `logits` is m x c, `targets` has the right class of each row. Return
# the mean loss over the rows, one number, and its gradient of the logits, in their dtype. Both have to be
# finite for any finite logits. (`logits[np.arange(m), targets]` picks one element of each row.)


# %% tags=["exercise"]
def softmax_cross_entropy(logits, targets):
    """The mean loss over the rows, and its gradient of the logits."""
    rows = np.arange(len(logits))
    ...  # about 7 lines


# %%
check(softmax_cross_entropy)

# %%
softmax_cross_entropy = or_solution(softmax_cross_entropy)
softmax_cross_entropy(
    np.array([[100.0, 0.0], [0.0, 0.0]], np.float32), np.array([0, 1])
)

# %% [markdown]
# ## All of it, and the judge
#
# Go forward once, then backward through the same operations in reverse order. The backward pass needs a result
# of the forward pass again (`hidden`). That is why training a network takes more memory than using it.


# %%
def loss_and_gradients(parameters, x, y, matmul):
    w1, b1, w2, b2 = parameters
    hidden, logits = forward(parameters, x, matmul)
    loss, g = softmax_cross_entropy(logits, y)
    g, w2_g, b2_g = linear_backward(np.maximum(hidden, 0), w2, g, matmul)
    g = relu_backward(hidden, g)
    _, w1_g, b1_g = linear_backward(x, w1, g, matmul)
    return loss, [w1_g, b1_g, w2_g, b2_g]


# %% [markdown]
# Does it agree with the judge? The next cell compares them in float64, on a small network (12 units in the
# middle), so that the judge does not take long. This is called a **gradient check**.

# %%
small = new_network((64, 12, 10), dtype=np.float64)
rows_x, rows_y = x[:20].astype(np.float64), y[:20]
_, gradients = loss_and_gradients(small, rows_x, rows_y, matmul)


def its_loss():
    return softmax_cross_entropy(forward(small, rows_x, matmul)[1], rows_y)[0]


for label, parameter, gradient in zip(("w1", "b1", "w2", "b2"), small, gradients):
    tried = numerical_gradient(its_loss, parameter)
    print(f"{label}: largest difference {np.abs(tried - gradient).max():.0e}")

# %% [markdown]
# Ten digits agree. The judge cannot do better: it divides a tiny difference, which has lost most of its digits,
# by a tiny h. **Why float64?** In float32 the difference has hardly any digits left:

# %%
small32 = [parameter.astype(np.float32) for parameter in small]
x32 = rows_x.astype(np.float32)
tried = numerical_gradient(
    lambda: softmax_cross_entropy(forward(small32, x32, matmul)[1], rows_y)[0],
    small32[3],
)
print(f"b2 in float32: largest difference {np.abs(tried - gradients[3]).max():.0e}")
print(f"the gradient's own largest element   {np.abs(gradients[3]).max():.0e}")

# %% [markdown]
# ## A step
#
# **Stochastic gradient descent**, SGD: take some rows (a **batch**), compute the gradients of their loss, move
# every parameter a little against its gradient, and take the next rows. The **learning rate** says how far to
# move.
#
# **Exercise 7.5: sgd_step.** Change each array of `parameters` *in place*: subtract `rate` times its gradient.
# Return nothing.


# %% tags=["exercise"]
def sgd_step(parameters, gradients, rate):
    """Move each parameter against its gradient, in place."""
    ...  # about 2 lines


# %%
check(sgd_step)

# %%
sgd_step = or_solution(sgd_step)


def train(parameters, matmul, epochs=20, batch=64, rate=0.2, seed=0):
    rng, losses = np.random.default_rng(seed), []
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for start in range(0, len(x), batch):
            rows = order[start : start + batch]
            loss, gradients = loss_and_gradients(parameters, x[rows], y[rows], matmul)
            sgd_step(parameters, gradients, rate)
            losses.append(loss)
    return losses


# %% [markdown]
# One pass over all rows is an **epoch**. Here are twenty of them:

# %%
network = new_network()
start = time.perf_counter()
losses = train(network, matmul)
print(f"{time.perf_counter() - start:.2f} s, loss {losses[0]:.2f} to {losses[-1]:.3f}")
print(f"{accuracy(network, test_x, test_y):.1%} of the held-out digits are read right")

# %%
figure, axes = draw(height=2.8)
axes.plot(losses, color=BLUE, linewidth=1)
axes.axhline(np.log(10), color=ORANGE, linestyle="--", linewidth=1)
name(axes, len(losses), np.log(10), "guessing", ORANGE)
axes.set(xlabel="step", ylabel="loss of the batch", ylim=0, xlim=(0, len(losses)))
show(
    figure,
    "The loss falls from guessing, and jumps: every batch has other rows.",
    alt="The loss against the steps: it starts near 2.3, falls fast in the first "
    "twenty steps, and then slowly, with small jumps.",
)

# %% [markdown]
# You have written a network that reads. It got these digits wrong:

# %%
said_digits = forward(network, test_x, matmul)[1].argmax(axis=1)
missed = np.flatnonzero(said_digits != test_y)[:7]
digit_pictures(
    test_x[missed],
    [f"{test_y[i]} as {said_digits[i]}" for i in missed],
    "Held-out digits that it got wrong: the digit, and the answer.",
)

# %% [markdown]
# ## How long should that take?
#
# Count. A product of m x k and k x n has m k n multiply-adds, which are 2 m k n FLOPs. A weight matrix has k n
# parameters. So the forward pass takes 2 FLOPs for each parameter and row, and the backward pass twice that:
# **6 x parameters x rows** in all. This rule works even for the largest models. Llama 3 405B has 405e9
# parameters, and learned from 15.6e12 tokens, which are its rows: 6 x 405e9 x 15.6e12 = 3.8e25 FLOPs. Its
# authors give the same number (Grattafiori and others 2024). (Biases cost next to nothing. In the first layer
# your `linear_backward` also computes the gradient of the pixels, which nothing uses. Libraries leave it out.)

# %%
parameters = sum(each.size for each in network)
flops = 6 * parameters * len(x)  # of an epoch
print(f"{parameters:,} parameters, {len(x):,} rows")
print(f"{flops / 1e6:,.0f} million FLOPs an epoch")

# %% [markdown]
# Now measure each rung's rate, for products as large as the first layer's. (The slowest two multiply only 8
# rows.)


# %%
# As in lesson 0, others that run meanwhile do not count; but a GPU does.
clock = time.perf_counter if backend() == "gpu" else time.process_time


def best_seconds(call, rounds):
    times = []
    for _ in range(rounds):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def rate_of(multiply, rows=64, rounds=20):
    a, b = x[:rows], network[0]
    multiply(a, b)  # the first call compiles
    return 2 * rows * b.size / best_seconds(lambda: multiply(a, b), rounds)


# %%
rungs = ["s2_vectors", "s3_compiled", "s4_loop_order", "s6_register_tile"]
if backend() == "gpu":
    rungs.append("s5_thread_tile_2d")  # matrices are copied to the GPU and back
multiplies = {each: rung(each).matmul for each in ("s1_python_loops", *rungs)}
multiplies["NumPy's BLAS"] = np.matmul
rates = {}
for label, multiply in multiplies.items():
    slow = label in ("s1_python_loops", "s2_vectors")
    rates[label] = rate_of(multiply, *((8, 1) if slow else ()))
    rate, t = rates[label] / 1e9, flops / rates[label]
    print(f"{label:20}{rate:9.4f} GFLOP/s: {t:10.4f} s an epoch")

# %% [markdown]
# ## Predict, then measure
#
# The right column would be the time of an epoch *if products were everything*. You ran twenty epochs. With the
# Python loops you would wait for minutes, so the next cells leave them out. Now guess: how many times as fast
# is an **epoch** on rung 6 as on rung 3? (From the table you can read it for the products alone.)

# %%
prediction = None  # your guess, such as 10; None draws no guess

# %%
epoch = {}
for label in [each for each in multiplies if each != "s1_python_loops"]:
    rounds = 1 if label == "s2_vectors" else 5
    run = partial(train, new_network(), multiplies[label], epochs=1)
    epoch[label] = best_seconds(run, rounds)
    print(f"{label:20}{epoch[label] * 1e3:9.1f} ms an epoch")
gain = epoch["s3_compiled"] / epoch["s6_register_tile"]
of_products = rates["s6_register_tile"] / rates["s3_compiled"]
print(f"rung 6 against rung 3: products {of_products:.1f} x, an epoch {gain:.1f} x")

# %% [markdown]
# Where did the rest go? An epoch also picks rows, and takes maxima, exponentials and sums, and Python calls all
# of this. You can measure how long that takes: train with a `matmul` that returns zeros at once. (The network
# learns nothing, of course.)


# %%
def no_matmul(a, b):
    return np.zeros((len(a), b.shape[1]), a.dtype)


rest = best_seconds(partial(train, new_network(), no_matmul, epochs=1), 5)
model = {label: rest + flops / rates[label] for label in epoch}
print(f"all but the products: {rest * 1e3:.1f} ms an epoch")
gain = model["s3_compiled"] / model["s6_register_tile"]
print(f"by the model an epoch on rung 6 is {gain:.1f} x as fast as on rung 3")

# %%
epochs_picture(epoch, model, rest, prediction)

# %% [markdown]
# With slow rungs an epoch takes as long as its products. With fast ones it hardly changes any more. It comes
# close to the dashed line, and even a product that took no time at all would only bring it *to* that line. This
# is **Amdahl's law** (1967): if you make one part faster, the other parts remain. Where a bar goes beyond its
# orange mark, the model's rate was too good: it was measured on the large first layer, forward. The second
# layer has only 10 columns and fills no tile. And in the backward pass one factor of each product is
# transposed, so it is not read along its rows.
#
# In a larger network, the products grow with the square of the width. The operations on single elements grow
# only with the width, and Python's calls not at all. So there the products are nearly everything again, and
# their rate decides. Change `sizes` in `new_network` to (64, 1024, 10), and see how the bars move. (If you have
# a GPU, its bar is long here: with such small products, copying the numbers there and back takes longer than
# the product.)
#
# The result did *not* change from rung to rung, except for rounding, because each rung adds in another order.

# %%
for label in ("s3_compiled", "s6_register_tile", "NumPy's BLAS"):
    again = new_network()
    losses = train(again, multiplies[label])
    right = accuracy(again, test_x, test_y)
    print(f"{label:20} last loss {losses[-1]:.9f}, {right:.1%} right")

# %% [markdown]
# ## Break it
#
# Here are six ways to begin, with ten epochs each: different learning rates, and different factors on the first
# weights. Which of them will learn? (A unit in the middle is *dead* if its input is negative or 0 for every
# held-out digit. Then ReLU passes nothing, forward or backward.)


# %%
def broken(rate, scale):
    network = new_network(scale=scale)
    with np.errstate(all="ignore"):
        losses = train(network, matmul, epochs=10, rate=rate)
    hidden, _ = forward(network, test_x, matmul)
    dead = (hidden <= 0).all(axis=0).sum()
    right = accuracy(network, test_x, test_y)
    print(f"{rate:6}{scale:11}{np.mean(losses[-20:]):13.3g}{right:8.0%}{dead:13}")


print("  rate    weights    last loss   right   dead units")
for rate, scale in ((0.2, 1), (0.002, 1), (20, 1), (0.2, 0.001), (0.2, 0), (0.2, 100)):
    broken(rate, scale)

# %% [markdown]
# With **too small a rate** the network learns, but slowly. With **too large a rate** it jumps across the
# valley, so far that nearly all units are dead: no row gives them a gradient any more, and no further training
# wakes them. **Zeros** never learn: the middle is 0, so w2 gets no gradient, and w2 is 0, so w1 gets none. Only
# the last bias moves, and the loss stays at log 10. **Tiny weights** are nearly as bad: small numbers are
# multiplied by small numbers, and the network learns little for a long time. **Huge weights** begin with a huge
# loss, which only a stable softmax survives. The network may end up right for many digits. But where it is
# wrong it is *very* sure, and the loss shows that.
#
# In *deep* networks this is worse, because each layer multiplies. The figure below shows ten layers with a ReLU
# after each: the typical size of the numbers after each layer, for three scales of the first weights. He and
# others (2015) derived the scale at which the numbers neither vanish nor explode: sqrt(2 / inputs).
# `new_network` uses it.


# %%
def sizes_through(scale, layers=10, width=256):
    rng = np.random.default_rng(0)
    signal, found = rng.standard_normal((32, width)), []
    for _ in range(layers):
        w = rng.standard_normal((width, width)) * np.sqrt(2 / width) * scale
        signal = np.maximum(matmul(signal, w), 0)
        found.append(np.sqrt((signal**2).mean()))
    return found


# %%
figure, axes = draw(height=3.0)
for scale, color in ((2, RED), (1, GREEN), (0.5, BLUE)):
    found = sizes_through(scale)
    axes.plot(range(1, 11), found, "o-", color=color, markersize=4)
    name(axes, 10, found[-1], f"{scale} x He's", color, dx=9)
axes.set(yscale="log", xlabel="layer", ylabel="typical size of its outputs")
show(
    figure,
    "Twice He's weights, and after ten layers the numbers are a thousand times as "
    "large; half, and they are a thousandth. Gradients go the same way back.",
    alt="Three lines over ten layers on a logarithmic scale: one rises steadily, one "
    "stays level, one falls steadily.",
)

# %% [markdown]
# ## The same with autograd
#
# PyTorch's autograd records the forward pass and calls each operation's backward function in reverse order. You
# did the same by hand. `minidist.model.matmul` plugs a rung into it (one class, with your two products in it).
# So from here on every network of this course can run on any rung. Do the same weights and the same rows give
# the same gradients?

# %%
rows_x, rows_y = data.train[torch.arange(64)]
linear = partial(Linear, rung=rung("s6_register_tile"))
model = MLP((64, 128, 10), linear=linear)
torch.nn.functional.cross_entropy(model(rows_x), rows_y).backward()
copied = [parameter.detach().numpy().T.copy() for parameter in model.parameters()]
_, gradients = loss_and_gradients(copied, rows_x.numpy(), rows_y.numpy(), matmul)
pairs = zip(model.parameters(), gradients)
max(np.abs(each.grad.numpy().T - mine).max() for each, mine in pairs)

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **A gradient that is nearly right** (a forgotten mean, a transposed square matrix) still makes the loss
#   fall. Only the gradient check finds it. Run it in float64, with sizes that are all different, so that a
#   wrong shape cannot fit.
# - **A check at a kink.** ReLU has no slope at 0. If x - h and x + h lie on different sides of 0, the two
#   gradients differ. A single bad element among thousands may be such a kink. A whole bad row is a bug.
# - **NaN.** It spreads, and when the loss is NaN it is too late to look. Check `np.isfinite` of the loss in
#   every step, and look at the step before: a large rate, a large logit, a log of 0.
# - **A loss that stays at log of the number of classes** (2.3 here): nothing is learned. The reason may be
#   zeros or tiny weights, a rate of almost 0, or `parameter = parameter - ...`, which changes no array.
# - **Good on the rows that it learned from, bad on others**: the network has memorized its rows. Only held-out
#   rows show that. Never use them to choose a rate or to decide when to stop, or they are no longer held out.
# - **The product is fast, but training is not**: measure the rest, as above, before you tune the product again.
#
# ## Further reading
#
# - Rumelhart, Hinton and Williams, *Learning representations by back-propagating errors*, 1986: the walk back,
#   in four pages.
# - He, Zhang, Ren and Sun, *Delving Deep into Rectifiers*, 2015: why the first weights are drawn with sqrt(2 /
#   inputs); section 2.2.
# - Bottou, Curtis and Nocedal, *Optimization Methods for Large-Scale Machine Learning*, 2018: what SGD does and
#   when it converges; sections 3 and 4.
#
# ## Where your lines live
#
# From here on, each lesson ends with a page of [the training ladder](../minidist/plain/__init__.py), which
# shows its idea once more in plain PyTorch. The library's engine has the same idea in general form:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | all of it: a step | plain/one_process.py: [`train`](../minidist/plain/one_process.py) | parallel/engine/training_step.py: [`Engine.step`](../minidist/parallel/engine/training_step.py) |
# | `linear_backward` | – | model/matmul.py: [`_Product.backward`](../minidist/model/matmul.py) |
#
# The rung's loop is like yours: the loss, every gradient, the update. But autograd walks back for you, a torch
# optimizer makes the step, and the network is a small GPT. `_Product` has your two products, and autograd calls
# it. The engine's step has the same three parts, for any model, layout and precision.
#
# Next: lesson 08 goes from one process to several, which can only send each other messages.
