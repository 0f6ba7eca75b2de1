"""ZeRO's stage 3 on four ranks with three layers, animated (lesson 14)."""

from __future__ import annotations

from checks.figures import BLUE, ORANGE
from checks.support.animations import Scene, animate

RANKS, LAYERS = range(4), range(3)
LEFT, TOP, STEP_X, STEP_Y = 86, 46, 146, 86
QUARTER, HEIGHT = 30, 28

Blocks = dict[str, tuple[int, int, str, bool]]


def sharded_layers() -> None:
    """Show it: blue blocks are weights, orange ones gradients, an outline marks what is only passing."""
    scene = Scene(680, 310)
    for rank in RANKS:
        scene.label(LEFT + STEP_X * rank + 2 * QUARTER, TOP - 16, f"rank {rank}")
    for layer in LAYERS:
        scene.label(LEFT - 14, _y(layer) + HEIGHT + 4, f"layer {layer + 1}", anchor="end")
        for rank in RANKS:
            scene.still(
                f'<rect x="{_x(rank, 0) - 4}" y="{_y(layer) - 4}" width="{4 * QUARTER + 8}" '
                f'height="{2 * HEIGHT + 12}" rx="5" fill="none" stroke="currentColor" opacity="0.4"/>'
            )
    every = [(layer, rank, part) for layer in LAYERS for rank in RANKS for part in RANKS]
    every.sort(key=lambda each: each[1] == each[2])  # a rank's own lies above the copies that others get
    for kind, color in (("g", ORANGE), ("w", BLUE)):
        for layer, rank, part in every:
            scene.block(f"{kind}{layer}{rank}{part}", QUARTER - 2, HEIGHT, color)
    _play(scene)
    animate(
        scene,
        "ZeRO's stage 3. Blue: weights. Orange: gradients. An outlined block is in memory only for a moment.",
        alt="Four ranks, each with a quarter of the weights of three layers. Going forward, a layer becomes "
        "whole on all ranks, and is a quarter again afterwards. Going backward it becomes whole once more, "
        "and beside it each rank computes its whole gradient. Each rank keeps a quarter of both.",
        pause=1700,
    )


def _x(rank: int, part: int) -> int:
    return LEFT + STEP_X * rank + QUARTER * part


def _y(layer: int) -> int:
    return TOP + STEP_Y * layer


def _play(scene: Scene) -> None:
    done: set[int] = set()  # layers whose gradients are there
    blocks: Blocks = {}

    def weights(layer: int, rank: int, part: int, at: int) -> None:
        blocks[f"w{layer}{rank}{part}"] = (_x(at, part), _y(layer), str(part), at != part)

    def gradient(layer: int, rank: int, part: int, at: int) -> None:
        place = _x(at, part), _y(layer) + HEIGHT + 4
        blocks[f"g{layer}{rank}{part}"] = (*place, str(part), at != part)

    def frame(note: str, whole: int | None = None, computed: bool = False, start: bool = False) -> None:
        blocks.clear()
        for layer in LAYERS:
            for rank in RANKS:
                for part in RANKS:
                    if layer == whole or rank == part:
                        weights(layer, rank, part, at=rank)
                    elif start:  # below its owner's, from where it goes out
                        weights(layer, rank, part, at=part)
                    if start:
                        blocks[f"g{layer}{rank}{part}"] = (_x(rank, rank), _y(layer), "", False)
                    elif layer == whole and computed:
                        gradient(layer, rank, part, at=rank)
                    elif layer in done:  # all ranks' have come together at the owner's
                        gradient(layer, rank, part, at=part)
        scene.frame(note, dict(blocks))

    frame("Each rank keeps a quarter of each layer's weights: rank 0 part 0, rank 1 part 1.", start=True)
    for layer in LAYERS:
        frame(f"Forward. Layer {layer + 1} is gathered: all ranks have it whole.", layer)
        frame(f"Each rank has computed its rows with layer {layer + 1}, and freed the other ranks' parts.")
    for layer in reversed(LAYERS):
        frame(f"Backward. Layer {layer + 1} is gathered once more.", layer)
        frame("Each rank has the whole gradient of its own rows.", layer, computed=True)
        done.add(layer)
        frame("A reduce-scatter: each rank gets its quarter of the mean gradient, and frees the rest.")
    frame("Each rank's optimizer updates its own quarter, without a message.")
