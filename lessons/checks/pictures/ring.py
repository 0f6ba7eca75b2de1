"""The ring all-reduce of four ranks, animated (lesson 8)."""

from __future__ import annotations

from checks.figures import COLORS
from checks.support.animations import Scene, animate

CORNERS = ((222, 24), (436, 150), (222, 276), (8, 150))
RANKS = PARTS = range(4)


def ring_animation() -> None:
    """Show it: a block says whose contributions it holds, and the blocks that travel have an outline."""
    scene = Scene(640, 320)
    slots = {}
    for rank, (x, y) in enumerate(CORNERS):
        scene.label(x + 97, y - 8, f"rank {rank}")
        scene.still(
            f'<rect x="{x - 4}" y="{y - 4}" width="202" height="40" rx="5" '
            'fill="none" stroke="currentColor"/>'
        )
        for part in PARTS:
            slots[rank, part] = (x + 49 * part, y)
            scene.block(f"{rank}{part}", 47, 32, COLORS[part])
    for part in PARTS:
        scene.block(f"part {part}", 47, 32, COLORS[part])
    _play(scene, slots)
    animate(
        scene,
        "A ring all-reduce of four ranks. Three steps add: the reduce-scatter. "
        "Three steps store: the all-gather.",
        alt="Four ranks in a ring, each with four coloured parts. In every step each rank passes one part to "
        "the next rank. After three steps each rank has one part that is summed over all ranks, and after "
        "three more all ranks have all parts of the sum.",
    )


def _play(scene: Scene, slots: dict[tuple[int, int], tuple[int, int]]) -> None:
    holds = {(rank, part): str(rank) for rank, part in slots}
    at = {part: (part + 1) % 4 for part in PARTS}  # part p begins on the rank after p, to end on p

    def frame(note: str, travels: bool = True) -> None:
        places = {f"{rank}{part}": (*slots[rank, part], holds[rank, part]) for rank, part in slots}
        if travels:
            for part, rank in at.items():
                places[f"part {part}"] = (*slots[rank, part], holds[rank, part], True)
        scene.frame(note, places)

    frame("Each rank has its own tensor, cut into four parts.", travels=False)
    frame("Each rank begins with another part: rank 1 with the blue one, rank 2 with the orange one.")
    for step in range(1, 7):
        for part, rank in at.items():
            after = at[part] = (rank + 1) % 4
            holds[after, part] = f"{holds[rank, part]}+{after}" if step < 3 else "sum"
        does = "added to what is there" if step <= 3 else "stored over what is there"
        frame(f"Step {step} of 6: every rank passes one part on, and what arrives is {does}.")
    frame("Every rank has the whole sum. All links were busy all the time.", travels=False)
