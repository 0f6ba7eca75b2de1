"""A systolic array at work, in two dataflows, and how busy it is (lesson 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from checks.figures import BLUE, GREEN, INK, ORANGE, draw, name, show
from checks.support.animations import Scene, animate

SIZE = 3  # of the array and of both matrices
A = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
B = ((2, 1, 1), (1, 3, 2), (4, 1, 5))
WIDTH, HEIGHT, PITCH_X, PITCH_Y = 92, 62, 100, 70  # of a PE, and from one to the next
LEFT = 206  # of the array
QUEUE_X, QUEUE_Y = 38, 26  # between elements that wait
TICKS = 3 * SIZE - 2
Places = dict[str, tuple[object, ...]]


def systolic_animation(stays: str) -> None:
    """Animate a product of 3 x 3 matrices on 3 x 3 PEs; the "output" stays in its place, or the "weight"."""
    weights = stays == "weight"
    array = Array(top=40) if weights else Array(top=150)
    scene = Scene(LEFT + SIZE * PITCH_X + 14, array.bottom + (92 if weights else 8))
    for i in range(SIZE):
        for j in range(SIZE):
            x, y = array.corner(i, j)
            scene.still(
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="currentColor" '
                'fill-opacity="0.06" stroke="currentColor" stroke-opacity="0.5"/>'
            )
    scene.label(LEFT - 12, array.top - 14, "a comes from here", 12, "end")
    if weights:
        scene.label(LEFT - 12, array.bottom + 24, "c comes out here", 12, "end")
    else:
        scene.label(LEFT, 40, "b comes from here", 12, "start")
    for key, width, color in (("a", 32, BLUE), ("b", 32, ORANGE), ("c", 42, GREEN)):
        for i in range(SIZE):
            for j in range(SIZE):
                scene.block(f"{key}{i}{j}", width, 22, color)
    for t in range(-1, TICKS):
        (_sums_move if weights else _sums_stay)(scene, array, t)
    if weights:
        scene.frame("All sums are out. The weights are still there, for the next rows of a.", _done(array))
    moves = "the sums (green) go down" if weights else "b (orange) goes down"
    rests = "b (orange) stays" if weights else "the sums (green) stay"
    animate(
        scene,
        f"Nine PEs multiply two matrices of 3 x 3. a (blue) goes right, {moves}, {rests}; a frame around a "
        "sum says that its PE works.",
        alt="A grid of three by three processing elements. Elements of a enter at the left, each row one "
        f"tick after the one above it, and move right; {moves}, and {rests}. A diagonal wave of work crosses "
        "the grid, and after seven ticks all nine elements of the product are complete.",
        pause=1900,
    )


@dataclass(frozen=True)
class Array:
    """Where things are."""

    top: int

    @property
    def bottom(self) -> int:
        """Below the last row of PEs."""
        return self.top + SIZE * PITCH_Y

    def corner(self, i: int, j: int) -> tuple[int, int]:
        """Of PE (i, j)."""
        return LEFT + j * PITCH_X, self.top + i * PITCH_Y

    def of_a(self, row: int, column: int) -> tuple[int, int]:
        """An element of a in its PE, or waiting at the left of its row; at column -1 it is next."""
        x, y = self.corner(row, max(column, 0))
        return (x + 6, y + 34) if column >= 0 else (LEFT + column * QUEUE_X - 6, y + 34)

    def of_b(self, row: int, column: int) -> tuple[int, int]:
        """An element of b in its PE, or waiting above its column."""
        x, y = self.corner(max(row, 0), column)
        return (x + 54, y + 6) if row >= 0 else (x + 54, self.top + row * QUEUE_Y - 2)

    def of_c(self, row: int, column: int) -> tuple[int, int]:
        """A sum in its PE."""
        x, y = self.corner(row, column)
        return x + 44, y + 34

    def out(self, i: int, j: int) -> tuple[int, int]:
        """A sum that has left at the bottom: row 0 was the first, and lies lowest."""
        return self.of_c(0, j)[0], self.bottom + 4 + (SIZE - 1 - i) * 28


def _sums_stay(scene: Scene, array: Array, t: int) -> None:
    places: Places = {}
    working = 0
    for i, j, p in product(range(SIZE), repeat=3):
        if t - i - p < SIZE:
            places[f"a{i}{p}"] = (*array.of_a(i, t - i - p), str(A[i][p]))
        if t - j - p < SIZE:
            places[f"b{p}{j}"] = (*array.of_b(t - j - p, j), str(B[p][j]))
        done = min(SIZE, max(0, t - i - j + 1))  # products that are in the sum by now
        works = 0 <= t - i - j < SIZE
        working += works and p == 0
        places[f"c{i}{j}"] = (*array.of_c(i, j), _sum(i, j, done), works)
    scene.frame(_note(t, working), places)


def _sums_move(scene: Scene, array: Array, t: int) -> None:
    places: Places = {}
    working = 0
    for i, p in product(range(SIZE), repeat=2):
        if t - i - p < SIZE:  # a[i, p] enters row p of the array, after i rows of a before it
            places[f"a{i}{p}"] = (*array.of_a(p, t - i - p), str(A[i][p]))
        places[f"b{i}{p}"] = (*array.of_b(i, p), str(B[i][p]))
    for i, j in product(range(SIZE), repeat=2):
        row = t - i - j
        if 0 <= row < SIZE:
            working += 1
            places[f"c{i}{j}"] = (*array.of_c(row, j), _sum(i, j, row + 1), True)
        elif row >= SIZE:
            places[f"c{i}{j}"] = (*array.out(i, j), _sum(i, j, SIZE))
    scene.frame(_note(t, working), places)


def _done(array: Array) -> Places:
    places: Places = {}
    for i, j in product(range(SIZE), repeat=2):
        places[f"b{i}{j}"] = (*array.of_b(i, j), str(B[i][j]))
        places[f"c{i}{j}"] = (*array.out(i, j), _sum(i, j, SIZE))
    return places


def _sum(i: int, j: int, products: int) -> str:
    return str(sum(A[i][p] * B[p][j] for p in range(products)))


def _note(t: int, working: int) -> str:
    if t < 0:
        return "Before it begins: each row waits one tick longer than the row above it."
    return f"Tick {t}: everything moves on by one, then {working} PE{'s work' if working > 1 else ' works'}."


def utilisation_figure(
    lengths: Sequence[int],
    counted: Sequence[float],
    formula: Sequence[float],
    guess: tuple[float, float] | None,
    caption: str,
    alt: str,
) -> None:
    """Show the share of PEs that work, counted and by formula, against k."""
    figure, axes = draw(height=3.4)
    axes.plot(lengths, [100 * share for share in formula], "--", color=BLUE, linewidth=1.2)
    axes.plot(lengths, [100 * share for share in counted], "o", color=BLUE)
    axes.axhline(90, color=INK, linestyle=":", linewidth=1)
    if guess is not None:
        axes.plot(guess[0], 100 * guess[1], "D", color=INK, fillstyle="none", markersize=9)
        name(axes, guess[0], 100 * guess[1], "your guess", INK, dx=9, dy=9)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 105)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(xlabel="k", ylabel="% of the PEs that work")
    show(figure, caption, alt)
