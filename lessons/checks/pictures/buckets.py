"""Tensors that share messages, as many neighbours as fit (lesson 10)."""

from __future__ import annotations

from checks.figures import BLUE, GREEN, ORANGE, PINK, RED, SKY
from checks.support.animations import Scene, animate

LENGTHS, LIMIT = (3, 4, 2, 5, 9, 2), 8
UNIT, HEIGHT = 18, 30  # pixels of an element, and of a tensor
LEFT, TOP, STEP = 130, 96, 46


def buckets_animation() -> None:
    """Animate six tensors that are put into messages of up to eight elements."""
    scene = Scene(640, TOP + 4 * STEP + 6)
    scene.label(LEFT - 14, 46, "the list", anchor="end")
    for message in range(4):
        y = TOP + STEP * message
        scene.label(LEFT - 14, y + 20, f"message {message + 1}", anchor="end")
        scene.still(
            f'<rect x="{LEFT - 3}" y="{y - 3}" width="{UNIT * LIMIT + 6}" height="{HEIGHT + 6}" rx="5" '
            'fill="none" stroke="currentColor" opacity="0.5" stroke-dasharray="5 4"/>'
        )
    for place, (length, color) in enumerate(zip(LENGTHS, (BLUE, ORANGE, GREEN, PINK, RED, SKY), strict=True)):
        scene.block(f"t{place}", UNIT * length - 2, HEIGHT, color)
    at = {f"t{i}": (LEFT - 100 + UNIT * sum(LENGTHS[:i]) + 6 * i, 26, str(n)) for i, n in enumerate(LENGTHS)}
    places: dict[str, tuple[object, ...]] = {key: (x + 100 - 2, y, text) for key, (x, y, text) in at.items()}
    scene.frame(
        f"Six tensors of {', '.join(map(str, LENGTHS))} elements; a message has at most {LIMIT}.",
        dict(places),
    )
    message, held = 0, 0
    for place, length in enumerate(LENGTHS):
        if held and held + length > LIMIT:
            why = f"{held} + {length} are more than {LIMIT}: the {length} begin message {message + 2}."
            message, held = message + 1, 0
            if length > LIMIT:
                why = f"{length} alone are more than {LIMIT}: message {message + 1} has this tensor only."
        else:
            why = (
                f"{held} + {length} = {held + length} fit."
                if held
                else f"The first {length} begin message 1."
            )
        places[f"t{place}"] = (LEFT + UNIT * held, TOP + STEP * message, str(length), True)
        held += length
        scene.frame(why, dict(places))
        places[f"t{place}"] = (*places[f"t{place}"][:3], False)
    scene.frame(
        f"{message + 1} messages, not {len(LENGTHS)}. Sum each over the ranks, and copy the sums back.",
        dict(places),
    )
    animate(
        scene,
        f"The rule with a limit of {LIMIT} elements. The number in a block is the tensor's length.",
        alt="Six tensors of 3, 4, 2, 5, 9 and 2 elements. The first message takes 3 and 4, since 2 more are "
        "too many. The second takes 2 and 5. The 9 are more than a message holds, and go alone. The last 2 "
        "begin a fourth message.",
        pause=2000,
    )
