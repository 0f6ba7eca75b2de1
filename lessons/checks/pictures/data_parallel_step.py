"""One step of data parallelism on four ranks, animated (lesson 9)."""

from __future__ import annotations

from typing import Any

from checks.figures import BLUE, ORANGE, SKY
from checks.support.animations import Scene, animate

RANKS, ROWS = range(4), range(8)
TOP, WIDE, HIGH = 96, 150, 122


def data_parallel_step() -> None:
    """Show it: rows are dealt, gradients computed and averaged, and every rank makes the same step."""
    scene = Scene(640, TOP + HIGH + 8)
    scene.label(8, 18, "a batch of eight rows", anchor="start")
    for rank in RANKS:
        left = 8 + 158 * rank
        scene.label(left + WIDE / 2, TOP + 19, f"rank {rank}")
        scene.still(
            f'<rect x="{left}" y="{TOP}" width="{WIDE}" height="{HIGH}" rx="5" fill="none" '
            'stroke="currentColor"/>'
        )
        scene.block(f"weights {rank}", 62, 30, BLUE)
        scene.block(f"gradient {rank}", 62, 30, ORANGE)
    for row in ROWS:
        scene.block(f"row {row}", 62, 30, SKY)
    _play(scene)
    animate(
        scene,
        "One step of data parallelism. Blue: weights. Light blue: rows. Orange: gradients.",
        alt="Four ranks. Rank 0's weights are copied to all. The eight rows of a batch are dealt out, two to "
        "each rank. Each rank computes a gradient from its rows. An all-reduce makes the gradients their "
        "mean, the same on all ranks, and all ranks make the same step.",
        pause=2200,
    )


def _play(scene: Scene) -> None:
    batch = {f"row {row}": (8 + 78 * row, 30, f"x{row}") for row in ROWS}
    dealt = {f"row {row}": (_left(row // 2) + 70 * (row % 2), TOP + 80, f"x{row}") for row in ROWS}

    def weights(*words: str) -> dict[str, Any]:
        return {f"weights {r}": (_left(r), TOP + 36, word) for r, word in enumerate(words)}

    def gradients(*words: str, outline: bool = False) -> dict[str, Any]:
        places = {f"gradient {r}": (_left(r) + 70, TOP + 36, word) for r, word in enumerate(words)}
        return {key: (*place, True) for key, place in places.items()} if outline else places

    own, same, new = weights("w0", "w1", "w2", "w3"), weights(*["w0"] * 4), weights(*["w0 new"] * 4)
    scene.frame("Each rank starts with weights of its own.", {**batch, **own})
    scene.frame("Once, at the start, a broadcast: now all ranks have rank 0's weights.", {**batch, **same})
    scene.frame("Every rank takes its shard of the batch's rows.", {**dealt, **same})
    mine = gradients("g0", "g1", "g2", "g3")
    scene.frame(
        "Forward and backward: each rank has the gradient of its own rows.", {**dealt, **same, **mine}
    )
    mean = gradients(*["mean"] * 4, outline=True)
    scene.frame("An all-reduce: every rank has the mean of the four gradients.", {**dealt, **same, **mean})
    scene.frame(
        "Each rank makes the same step from the same weights, so all have the same new weights.",
        {**dealt, **new, **mean},
    )
    scene.frame("The next batch. Weights are never sent again.", {**batch, **new})


def _left(rank: int) -> int:
    return 8 + 158 * rank + 9
