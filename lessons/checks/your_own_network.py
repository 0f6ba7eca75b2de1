"""Checks of lesson 7: gradients by trying, of ReLU, of a linear layer, of the loss, and a step of SGD."""

from __future__ import annotations

from typing import Any

import numpy as np

from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, wrong
from checks.support.words import plural

lesson = Lesson(7, "your_own_network")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

Array = np.ndarray[Any, Any]


@lesson.exercise(
    "7.1",
    hints=(
        "The slope of a curve at a place: go a little to the right, then a little to the left. Divide the "
        "change of the loss by the distance between the two places. loss() takes no argument: it sees the "
        "numbers in x.",
        "Keep x[i] in a variable. Set x[i] to that plus h, and call loss(). Set it to that minus h, and "
        "call loss() again. Then put the old value back. The two places are 2 h apart.",
        "before = x[i]; x[i] = before + h; above = loss(); x[i] = before - h; below = loss(); x[i] = before; "
        "gradient[i] = (above - below) / (2 * h)",
    ),
)
def numerical_gradient(answer: Answer, draw: np.random.Generator) -> Right:
    """Central differences, in place, at two evaluations an element."""
    tally, tried = Tally(), 0
    for shape in ((3,), (1,), (2, 3), (0,), (5, 7), (2, 2, 3)):
        a, x = draw.uniform(1, 2, shape), draw.standard_normal(shape)
        for kind, value, slope in (
            ("the sum of a x", lambda x, a: (a * x).sum(), lambda x, a: a),
            ("the sum of a x^2", lambda x, a: (a * x**2).sum(), lambda x, a: 2 * a * x),
            ("the sum of exp(a x)", lambda x, a: np.exp(a * x).sum(), lambda x, a: a * np.exp(a * x)),
        ):
            _try_slopes(answer, tally, kind, x, a, value, slope)
            tried += 1
    _try_large_step(answer, draw)
    return Right(tried + 1, tally.scores)


def _try_large_step(answer: Answer, draw: np.random.Generator) -> None:
    """On a curve, how far `h` goes shows in the slope; and x is a view whose rows do not lie side by side."""
    h, rows = float(draw.uniform(0.1, 0.3)), draw.standard_normal((3, 2))
    x, where = rows.T, f"With the sum of x^3 for the loss, a transposed x of shape (2, 3) and h = {h:.3g}"
    got = answer(lambda: float((x**3).sum()), x, h)
    compare(got, 3 * x**2 + h**2, f"{where}, the gradient", rtol=1e-7, atol=1e-7)


def _try_slopes(answer: Answer, tally: Tally, kind: str, x: Array, a: Array, value: Any, slope: Any) -> None:
    given, calls = x.copy(), [0]

    def loss() -> float:
        calls[0] += 1
        return float(value(given, a))

    where = f"With {kind} for the loss and x of shape {x.shape}"
    right = slope(x, a)
    moved = {"All elements were moved at once: that is the sum of the slopes.": np.full(x.shape, right.sum())}
    compare(answer(loss, given), right, f"{where}, the gradient", rtol=1e-7, atol=1e-7, wrongs=moved)
    if not np.array_equal(given, x):
        place = tuple(int(i) for i in np.argwhere(given != x)[0])
        wrong(
            f"{where}, x is not what it was: element {list(place)} was {float(x[place])!r} and is "
            f"{float(given[place])!r}. Keep the value, and put it back."
        )
    tally.add("Calls of loss", calls[0], 2 * x.size, "two for each element: one above, one below")


@lesson.exercise(
    "7.2",
    hints=(
        "Where x was positive, the result was x itself: a change of x is a change of the result. And where "
        "x was negative?",
        "So g goes through unchanged where x > 0, and is 0 elsewhere. (x > 0) is an array of True and "
        "False, which count as 1 and 0.",
        "return g * (x > 0)",
    ),
)
def relu_backward(answer: Answer, draw: np.random.Generator) -> Right:
    """The gradient passes where x was positive."""
    tried = 0
    for shape in ((4,), (1,), (0, 3), (2, 5), (7, 3)):
        for dtype in (np.float64, np.float32):
            x, g = (draw.uniform(0.1, 1, shape) * draw.choice([-1, 1], shape) for _ in range(2))
            if x.size >= 4:
                x.flat[:4] = (1.5, -1.5, 0.0, 0.5)
            x, g = x.astype(dtype), g.astype(dtype)
            wrongs = {
                "That is the forward pass: what passes on is g.": np.maximum(x, 0),
                "That asks where g is positive, and x decides.": np.where(g > 0, g, 0),
                "Where x is exactly 0 the slope is 0.": np.where(x >= 0, g, 0),
            }
            answer.expect(np.where(x > 0, g, 0).astype(dtype), x, g, wrongs=wrongs)
            tried += 1
    return Right(tried)


class Counting:
    """A product that counts its calls and its FLOPs, and wants matrices that fit."""

    def __init__(self) -> None:
        self.calls, self.flops = 0, 0

    def __call__(self, a: Any, b: Any) -> Array:
        """A times b."""
        for letter, x in (("a", a), ("b", b)):
            if not isinstance(x, np.ndarray) or x.ndim != 2:
                raise ValueError(f"matmul takes matrices, and {letter} has shape {np.shape(x)}")
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"{a.shape} times {b.shape} do not fit")
        self.calls += 1
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return np.asarray(a @ b)

    __name__ = "matmul"


@lesson.exercise(
    "7.3",
    hints=(
        "Write the shapes beside the letters: x (m, k), w (k, n), g (m, n). The gradient of w has w's "
        "shape, and is made of x and g. In which order, and with which of the two transposed, do they give "
        "(k, n)?",
        "The gradient of x is g times w transposed: (m, n) times (n, k). The gradient of w is x transposed "
        "times g: (k, m) times (m, n). b was added to every row, so its gradient is the sum over the rows "
        "of g.",
        "return matmul(g, w.T), matmul(x.T, g), g.sum(axis=0)",
    ),
)
def linear_backward(answer: Answer, draw: np.random.Generator) -> Right:
    """Two products and a sum."""
    tally, tried = Tally(), 0
    for m, k, n in ((4, 3, 2), (1, 1, 1), (1, 3, 2), (2, 3, 3), (3, 3, 3), (5, 1, 4), (0, 2, 3), (8, 6, 10)):
        x, w, g = (draw.standard_normal(shape) for shape in ((m, k), (k, n), (m, n)))
        matmul = Counting()
        where = f"With x {m} x {k}, w {k} x {n} and g {m} x {n}"
        given = x.copy(), w.copy(), g.copy()
        got = answer(*given, matmul)
        if not isinstance(got, (tuple, list)) or len(got) != 3:
            wrong(f"{where} it returns {type(got).__name__}, and should return three: of x, of w, of b.")
        for of, mine, right in zip("xwb", got, (g @ w.T, x.T @ g, g.sum(0)), strict=True):
            compare(mine, right, f"{where}, the gradient of {of}")
        answer.unchanged(f"{where} it", (x, w, g), given)
        if matmul.calls < 2:
            wrong(
                f"{where} it calls matmul {matmul.calls} times: both products have to go through it, since "
                f"it is "
                "what is changed later."
            )
        tally.add("Products", matmul.calls, 2, "one for x and one for w; the gradient of b is a sum")
        tally.add("Their FLOPs", matmul.flops, 4 * m * k * n, "as many for each as forward has")
        tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "7.4",
    hints=(
        "Three steps. Subtract from each row its largest logit. Then exp of all, and the sum of each row. "
        "From these follow both: the loss is log of the sum, minus the shifted logit of the right class.",
        "rows = np.arange(len(logits)) and targets together pick one element of each row: shifted[rows, "
        "targets]. The gradient is exp / sum, minus 1 at these places, and all of it divided by the number "
        "of rows.",
        "shifted = logits - logits.max(axis=1, keepdims=True); exp = np.exp(shifted); total = "
        "exp.sum(axis=1, keepdims=True); loss = np.mean(np.log(total[:, 0]) - shifted[rows, targets]); "
        "gradient = exp / total; gradient[rows, targets] -= 1; return loss, gradient / len(logits)",
    ),
)
def softmax_cross_entropy(answer: Answer, draw: np.random.Generator) -> Right:
    """The loss and its gradient, also for logits whose exp no float can hold."""
    tried = 0
    for size, dtype in ((1.0, np.float64), (1.0, np.float32), (1e3, np.float64), (1e4, np.float32)):
        for rows, classes in ((3, 4), (1, 2), (1, 1), (8, 10)):
            logits = (size * draw.uniform(-1, 1, (rows, classes))).astype(dtype)
            targets = draw.integers(0, classes, rows)
            if size > 1:
                # The right class far below another, and rows far apart from each other.
                targets = logits.argmin(axis=1)
                logits[0] -= np.float32(2 * size)
            _try_loss(answer, logits, targets)
            tried += 1
    return Right(tried)


def infinite(got: Array, first: tuple[int, ...]) -> str:
    """For `compare`: why a loss is no number."""
    return "" if np.isfinite(got).all() else "exp of a large logit is infinite: subtract the largest first."


def _try_loss(answer: Answer, logits: Array, targets: Array) -> None:
    rows, classes = logits.shape
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    share = np.exp(exact) / np.exp(exact).sum(axis=1, keepdims=True)
    right = float(np.mean(np.log(np.exp(exact).sum(axis=1)) - exact[np.arange(rows), targets]))
    gradient = (share - np.eye(classes)[targets]) / rows
    where = (
        f"With {plural(rows, 'row')} of {classes} logits between {logits.min():.3g} and {logits.max():.3g}"
    )
    given = logits.copy(), targets.copy()
    with np.errstate(all="ignore"):
        got = answer(*given)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        wrong(f"{where} it returns {type(got).__name__}, and should return two: the loss, and its gradient.")
    loss = got[0]
    if np.ndim(loss) != 0:
        wrong(f"{where}, the loss has the shape {np.shape(loss)}, and should be one number: the mean.")
    compare(loss, right, f"{where}, the loss", rtol=1e-4, atol=1e-5, story=infinite)
    compare(got[1], gradient.astype(logits.dtype), f"{where}, the gradient", rtol=1e-4, atol=1e-6)
    answer.unchanged(f"{where} it", (logits, targets), given)


@lesson.exercise(
    "7.5",
    hints=(
        "The gradient points uphill. Which way does the loss fall, and how far does the step go?",
        "For each parameter and its gradient: subtract rate * gradient. Change the array itself: parameter "
        "= ... only gives the name to a new array, and the caller does not see that.",
        "for parameter, gradient in zip(parameters, gradients): parameter -= rate * gradient",
    ),
)
def sgd_step(answer: Answer, draw: np.random.Generator) -> Right:
    """Parameters change in place."""
    tried = 0
    for shapes in ([(3,)], [(1,)], [(2, 3), (3,)], [(4, 2), (2,), (2, 5), (5,)]):
        for rate, order in ((1.0, "C"), (0.5, "C"), (0.0, "C"), (float(draw.uniform(0.01, 2)), "F")):
            old = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
            gradients = [draw.uniform(0.5, 1, shape).astype(np.float32) for shape in shapes]
            parameters = [each.copy(order) for each in old]  # in "F" order, reshape(-1) is a copy
            kept = [each.copy() for each in gradients]
            given = list(parameters)
            answer(given, gradients, rate)
            for place, (now, before, gradient) in enumerate(zip(parameters, old, kept, strict=True)):
                where = f"With a rate of {rate:.3g} and arrays of shapes {', '.join(map(str, shapes))}"
                right = before - np.float32(rate) * gradient
                wrongs = {
                    "That goes uphill: subtract.": 2 * before - right,
                    "That is a step with a rate of 1: multiply the gradient by rate.": before - gradient,
                }
                what = f"{where}, parameter {place} afterwards"
                compare(now, right, what, before=before, wrongs=wrongs)
                compare(
                    gradients[place], gradient, f"{where}, gradient {place}, which should stay as it was,"
                )
            tried += 1
    return Right(tried)
