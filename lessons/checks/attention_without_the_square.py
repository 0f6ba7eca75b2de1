"""Checks of lesson 17: numbers moved, a softmax in one pass, parts, blocks, a kernel, and the gradients."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from checks.cuda_from_python import unwritten
from checks.kernels import in_float64, run
from checks.shared_memory import barriers_of_a_warp
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Score, compare, parts, wrong

lesson = Lesson(17, "attention_without_the_square")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

WIDTH, KEYS, QUERIES = 16, 32, 64  # of the kernel: a head's width, keys of a tile, threads of a block
NEAR = {"rtol": 1e-4, "atol": 1e-5}  # float32, and sums of a hundred terms in any order


def peak(function: Callable[..., Any], *args: Any) -> int:
    """Return the bytes that Python and NumPy hold at most while the function runs, beside its arguments."""
    tracemalloc.start()
    try:
        function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> tuple[np.ndarray, ...]:
    """Return weights, result and logarithms of the sums in float64, by the definition."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        scores[~np.tri(*scores.shape, dtype=bool)] = -np.inf
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total, weights / total @ v, (largest + np.log(total))[:, 0]


def _drawn(draw: np.random.Generator, queries: int, keys: int, width: int, sharp: float) -> list[np.ndarray]:
    shapes = ((queries, width), (keys, width), (keys, width))
    q, k, v = (draw.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [q * np.float32(sharp), k, v]


@lesson.exercise(
    "17.1",
    hints=(
        "Write down, for each of the three kernels, which arrays it reads and which one it writes, with "
        "their shapes. Four of these arrays are T x D.",
        "The first reads q and k, and writes the scores. The second reads the scores, and writes the "
        "weights. The third reads the weights and v, and writes the result.",
        "return 4 * T * D + 4 * T * T",
    ),
)
def numbers_moved(answer: Answer, draw: np.random.Generator) -> Right:
    """Numbers through global memory, as a formula."""
    cases = [
        (2, 3),
        (1, 1),
        (64, 16),
        (1024, 64),
        *((int(t), int(d)) for t, d in draw.integers(3, 999, (8, 2))),
    ]
    for t, d in cases:
        small, square = t * d, t * t
        wrongs = {
            "That leaves out a kernel: the softmax reads the scores, and writes the weights.": (
                4 * small + 2 * square
            ),
            "That is the inputs and the result: what lies between the kernels moves, too.": 4 * small,
            "That is all that is read: each kernel also writes.": 3 * small + 2 * square,
            "Those are bytes: count numbers.": 16 * (small + square),
        }
        answer.expect(4 * small + 4 * square, t, d, wrongs=wrongs)
    return Right(len(cases))


class Scores:
    """Scores that can be gone through once, as they are made: `for score in scores`."""

    def __init__(self, values: np.ndarray) -> None:
        self._values: Iterator[float] = map(float, values)
        self._text = f"scores {', '.join(f'{x:.4g}' for x in values[:4])}{', ...' * (len(values) > 4)}"

    def __iter__(self) -> Iterator[float]:
        return self._values

    def __repr__(self) -> str:
        return self._text


@lesson.exercise(
    "17.2",
    hints=(
        "Go through the scores 1, 3, 2 by hand. After 1 the largest is 1, and the sum is exp(1 - 1) = 1. "
        "What should the sum be after 3, if the largest is 3? By which factor is the old sum off?",
        "If a score is larger than the largest so far, multiply the sum by exp(old largest - score), and "
        "keep the score as the largest. Then, in any case, add exp(score - largest). Begin with -math.inf "
        "and 0.0.",
        "largest, total = -math.inf, 0.0; for score in scores: [if score > largest: total *= "
        "math.exp(largest - score); largest = score]; total += math.exp(score - largest). At the end return "
        "largest, total",
    ),
)
def one_pass(answer: Answer, draw: np.random.Generator) -> Right:
    """The largest and the sum, from an iterator."""
    cases = [
        [1.0, 3.0, 2.0],
        [5.0],
        [3.0, 2.0, 1.0],
        [-1000.0, -1001.0],
        [1000.0, 2000.0, 1999.0],
        [2.0, 2.0],
    ]
    cases += [(draw.standard_normal(int(n)) * 10).tolist() for n in draw.integers(2, 60, 8)]
    for values in cases:
        x = np.array(values)
        top = x.max()
        right = np.array([top, np.exp(x - top).sum()])
        running = np.maximum.accumulate(x)
        with np.errstate(over="ignore"):
            wrongs = {
                "Terms are made with the largest of their time: rescale the sum when a larger comes.": (
                    np.array([top, np.exp(x - running).sum()])
                ),
                "The scores can be gone through only once, and here they were used up before the sum.": (
                    np.array([top, 0.0])
                ),
                "That leaves the exponentials as they are: they may overflow.": np.array(
                    [top, np.exp(x).sum()]
                ),
            }
        got = parts(answer(Scores(x)))
        if len(got) != 2:
            wrong(f"one_pass({Scores(x)}) should return two numbers: the largest, and the sum.")
        compare(np.array(got, np.float64), right, f"one_pass({Scores(x)})", rtol=1e-9, atol=0, wrongs=wrongs)
    many = draw.standard_normal(20_000)
    kept = peak(answer, Scores(many)) / 1000
    idea = "take each score as it comes: no list of them"
    return Right(len(cases) + 1, (Score("Memory for 20 000 scores", round(kept), 30, idea, "kB"),))


@lesson.exercise(
    "17.3",
    hints=(
        "This is exercise 17.2 for two sums at once. What is the largest of both parts together? By which "
        "factor does each part's sum change, if it was made with its own largest?",
        "The factor of a part is exp(its largest - the common largest): 1 for the part that has it, and less "
        "for the other. Multiply both the total and the sums of the part by it, then add.",
        "largest = max(one[0], other[0]); first, second = math.exp(one[0] - largest), math.exp(other[0] - "
        "largest); return largest, first * one[1] + second * other[1], first * one[2] + second * other[2]",
    ),
)
def merged(answer: Answer, draw: np.random.Generator) -> Right:
    """Two parts of the keys, put together."""
    sizes = [(1, 1, 1), (2, 3, 2), (0, 2, 3), (3, 0, 2)]
    sizes += [tuple(int(n) for n in draw.integers(1, 9, 3)) for _ in range(8)]
    for place, (one, other, width) in enumerate(sizes):
        scores = draw.standard_normal(one + other) * 3 + 800 * (place % 3 - 1)
        v = draw.standard_normal((one + other, width))
        first, second, whole = (_part(scores[s], v[s]) for s in (slice(one), slice(one, None), slice(None)))
        says = f"With parts of {one} and {other} keys, "
        got = parts(answer(first, second))
        if len(got) != 3:
            wrong(f"{says}merged should return three things: largest, total and sums.")
        top = whole[0]
        with np.errstate(over="ignore", invalid="ignore"):
            factors = [
                ("That adds up what was made with different largest scores: rescale each part.", 1.0, 1.0),
                (
                    "That rescales the wrong way round: the factor is exp(its largest - the common one).",
                    *np.exp(top - np.array([first[0], second[0]])),
                ),
            ]
            for index, what in enumerate(("largest", "total", "sums")):
                wrongs = {say: a * first[index] + b * second[index] for say, a, b in factors} if index else {}
                if index == 2:
                    wrongs["The sums are not divided by the total yet: that comes at the end."] = (
                        whole[2] / whole[1]
                    )
                compare(got[index], whole[index], f"{says}{what}", rtol=1e-9, atol=1e-12, wrongs=wrongs)
        for name, part, (x, y) in (
            ("one", first, (scores[:one], v[:one])),
            ("other", second, (scores[one:], v[one:])),
        ):
            if not np.array_equal(part[2], _part(x, y)[2]):
                wrong(f"{says}it returns what it should, but changes {name}, which is the caller's.")
    return Right(len(sizes))


def _part(scores: np.ndarray, v: np.ndarray) -> tuple[float, float, np.ndarray]:
    largest = float(scores.max(initial=-np.inf))
    weights = np.exp(scores - largest)
    return largest, float(weights.sum()), weights @ v


@lesson.exercise(
    "17.4",
    hints=(
        "Keep three arrays for all queries: largest (T, 1), total (T, 1), and sums (T, D). A block's scores "
        "are (T, block). Then do what merged does, for all queries at once.",
        "For each block: scores = q @ k[first : first + block].T / math.sqrt(D); higher = "
        "np.maximum(largest, scores.max(axis=1, keepdims=True)); weights = np.exp(scores - higher); and "
        "everything so far is multiplied by np.exp(largest - higher). The last block may be shorter: slices "
        "end by themselves.",
        "After the two lines of hint 2: fade = np.exp(largest - higher); total = fade * total + "
        "weights.sum(axis=1, keepdims=True); sums = fade * sums + weights @ v[first : first + block]; "
        "largest = higher. After the loop return sums / total, (largest + np.log(total))[:, 0]",
    ),
)
def attention_in_blocks(answer: Answer, draw: np.random.Generator) -> Right:
    """Attention without an array of T x T."""
    cases = [
        (3, 4, 2, 2, 1.0),
        (1, 1, 1, 4, 1.0),
        (4, 5, 3, 2, 1.0),
        (6, 6, 4, 10, 1.0),
        (8, 40, 5, 8, 200.0),
    ]
    cases += [(*(int(n) for n in draw.integers(2, 30, 4)), 1.0) for _ in range(4)]
    for queries, keys, width, block, sharp in cases:
        q, k, v = _drawn(draw, queries, keys, width, sharp)
        says = f"With {queries} queries, {keys} keys, D = {width} and block = {block}, "
        _compare_result(answer, (q, k, v, block), says, exact(q, k, v)[1:], _mistakes(q, k, v, block))
    return Right(len(cases) + 1, (_memory(answer, draw, backward=False),))


def _mistakes(q: np.ndarray, k: np.ndarray, v: np.ndarray, block: int) -> dict[str, np.ndarray]:
    whole = len(k) // block * block
    pieces = [exact(q, k[i : i + block], v[i : i + block])[1] for i in range(0, len(k), block)]
    found = {
        "That leaves out 1 / sqrt(D).": exact(q * np.float32(math.sqrt(q.shape[1])), k, v)[1],
        "That is the mean of the blocks' own results: blocks with large scores count for more.": (
            np.mean(pieces, axis=0)
        ),
        "That is the result of the last block alone.": pieces[-1],
    }
    if 0 < whole < len(k):
        found["That leaves out the last, shorter block."] = exact(q, k[:whole], v[:whole])[1]
    return found


def _compare_result(
    answer: Answer, args: tuple[Any, ...], says: str, right: tuple[np.ndarray, ...], wrongs: dict[str, Any]
) -> None:
    kept = [np.copy(x) for x in args]
    got = parts(answer(*args))
    if len(got) != len(right):
        wrong(f"{says}{answer.name} should return {len(right)} arrays.")
    names = ("the result", "the logarithms") if len(right) == 2 else ("dq", "dk", "dv")
    for index, (name, expected) in enumerate(zip(names, right, strict=True)):
        known = {say: each if len(right) == 2 else each[index] for say, each in wrongs.items()}
        known = known if len(right) > 2 or index == 0 else {}
        compare(got[index], expected.astype(np.float32), f"{says}{name}", **NEAR, wrongs=known)
    answer.unchanged(f"{says}it", kept, list(args))


def _memory(answer: Answer, draw: np.random.Generator, backward: bool) -> Score:
    """What an answer holds at a time, at 512 positions; the definition holds several numbers for each key."""
    positions, width, block = 512, 8, 16
    q, k, v = _drawn(draw, positions, positions, width, 1.0)
    args: tuple[Any, ...] = (q, k, v, block)
    if backward:
        _, out, logs = (x.astype(np.float32) for x in exact(q, k, v))
        args = (q, k, v, out, logs, q, block)
    held = math.ceil(peak(answer, *args) / (4 * positions * block))
    idea = "let no array be larger than T x block, and keep none of an earlier block"
    return Score("Arrays of T x block held at a time", held, 9 if backward else 6, idea)


@lesson.exercise(
    "17.5",
    hints=(
        "It is one_pass, with the weighted values beside the total. Between the barriers a thread goes "
        "through the keys of the tile that its query sees: a score, which is a dot product of query and a "
        "row of tile_k; perhaps a new largest; a weight; and the row of tile_v, times the weight, added to "
        "sums.",
        "seen = min(KEYS, (i + 1 if causal else k.shape[0]) - first) keys of this tile are seen, perhaps "
        "none. If the score is larger than the largest so far, multiply total and all of sums by "
        "math.exp(largest - score). With causal the loop may end at the block's last query: end = min(end, "
        "(cuda.blockIdx.x + 1) * cuda.blockDim.x), the same for all threads of the block.",
        "for j in range(seen): score = float32(0); [for c in range(WIDTH): score += query[c] * tile_k[j, "
        "c]]; if score > largest: [fade = math.exp(largest - score); total *= fade; for c: sums[c] *= fade; "
        "largest = score]; weight = math.exp(score - largest); total += weight; [for c: sums[c] += weight * "
        "tile_v[j, c]]. At the end: if i < q.shape[0]: [for c: out[i, c] = sums[c] / total]; logs[i] = "
        "largest + math.log(total)",
    ),
)
def flash_attention(answer: Answer, draw: np.random.Generator) -> Right:
    """The kernel, in the emulator."""
    cases = [(2, 3, 0, 1.0), (1, 1, 1, 1.0), (64, 64, 0, 1.0), (70, 70, 1, 1.0), (5, 40, 0, 50.0)]
    cases += [(*[int(n) for n in draw.integers(33, 90, 2)], 0, 1.0), (128, 128, 0, 1.0), (256, 256, 1, 1.0)]
    counts = []
    for queries, keys, causal, sharp in cases:
        q, k, v = _drawn(draw, queries, keys, WIDTH, sharp)
        out, logs = unwritten(queries, WIDTH), unwritten(queries)
        says = f"{queries} queries, {keys} keys and causal = {causal}"
        counts.append(run(answer, says, -(-queries // QUERIES), QUERIES, q, k, v, out, logs, causal))
        _, right, right_logs = exact(q, k, v, bool(causal))
        ends = range(QUERIES, queries + QUERIES, QUERIES) if causal else ()
        later = [exact(q[end - QUERIES : end], k[:end], v[:end])[1] for end in ends]
        wrongs = {
            "That also sees keys after the query, which causal hides.": np.concatenate([*later, right[:0]])
        }
        compare(out, right.astype(np.float32), f"With {says}, out", **NEAR, before=np.nan, wrongs=wrongs)
        compare(logs, right_logs.astype(np.float32), f"With {says}, logs", **NEAR, before=np.nan)
    *_, whole, half = counts
    tiles = [
        (each.total.load_bytes / 4 / WIDTH - queries) / (2 * KEYS)
        for each, queries in ((whole, 128), (half, 256))
    ]
    skip = "with causal, end the loop over tiles at the block's last query: `end` is the same for its threads"
    scores = (
        Score(
            "Tiles read from global memory for 128 queries",
            tiles[0],
            2 * 4,
            "leave those reads to fetch, and take keys and values from the tiles",
        ),
        Score("Tiles for 256 causal queries", tiles[1], 2 + 4 + 6 + 8, skip),
        Score("Barriers for each tile", barriers_of_a_warp(whole, 2 * 2 * 4), 2, "two are enough"),
        Score(
            "Bank conflicts",
            whole.shared_conflicts,
            0,
            "let all threads read the same row of a tile at a time",
        ),
        Score(
            "Accesses to local memory",
            sum(whole.instructions.get(f"{kind} local", 0) for kind in ("load", "store")),
            0,
            "let every index of query and sums be known when compiling: range(WIDTH)",
        ),
    )
    return Right(len(cases), scores + in_float64(answer.function, q, k, v, out, logs, 0))


@lesson.exercise(
    "17.6",
    hints=(
        "For each block of keys compute its weights again: exp(scores - logs), with logs as a column. They "
        "are right at once: no largest, no sum. Then follow the four formulas above, with the block's keys.",
        "dv of the block's keys is weights.T @ d_out. The gradient of the scores is weights * (d_out @ "
        "v_block.T - mean), where mean is the column (out * d_out).sum(axis=1, keepdims=True). Scores are a "
        "product divided by sqrt(D), so dq and dk are, too. Every block adds to dq.",
        "mean as in hint 2, before the loop. own = slice(first, first + block); weights = np.exp(q @ "
        "k[own].T / root - logs[:, None]); dv[own] = weights.T @ d_out; d_scores = weights * (d_out @ "
        "v[own].T - mean) / root; dk[own] = d_scores.T @ q; dq += d_scores @ k[own]",
    ),
)
def gradients_in_blocks(answer: Answer, draw: np.random.Generator) -> Right:
    """The backward pass, which computes the weights again."""
    cases = [(3, 4, 2, 2), (1, 1, 1, 4), (4, 5, 3, 2), (6, 6, 4, 10)]
    cases += [tuple(int(n) for n in draw.integers(2, 30, 4)) for _ in range(5)]
    for queries, keys, width, block in cases:
        q, k, v = _drawn(draw, queries, keys, width, 1.0)
        d_out = draw.standard_normal((queries, width)).astype(np.float32)
        weights, out, logs = exact(q, k, v)
        d_weights = d_out.astype(np.float64) @ v.T
        mean = (d_weights * weights).sum(axis=1, keepdims=True)

        slopes = weights * (d_weights - mean) / math.sqrt(width)
        mistakes = {
            "": slopes,
            "That leaves out the mean: raising one weight lowers all others.": (
                weights * d_weights / math.sqrt(width)
            ),
            "That leaves out 1 / sqrt(D), by which the scores were divided.": slopes * math.sqrt(width),
            "That takes the gradient of the weights for that of the scores.": d_weights / math.sqrt(width),
        }
        wrongs = {say: (x @ k, x.T @ q, weights.T @ d_out) for say, x in mistakes.items()}
        right = wrongs.pop("")
        args = (q, k, v, out.astype(np.float32), logs.astype(np.float32), d_out, block)
        says = f"With {queries} queries, {keys} keys, D = {width} and block = {block}, "
        _compare_result(answer, args, says, right, wrongs)
    return Right(len(cases) + 1, (_memory(answer, draw, backward=True),))
