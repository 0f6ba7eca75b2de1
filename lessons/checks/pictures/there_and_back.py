"""Forward through a network of two layers, and the gradients on their way back, animated (lesson 7)."""

from __future__ import annotations

from typing import Any

from checks.figures import BLUE, GREEN, ORANGE
from checks.support.animations import Scene, animate

STATIONS = ("rows", "linear w1, b1", "ReLU", "linear w2, b2", "loss")
WIDE, GAP, TOP = 108, 24, 58
VALUES = ("m x 64", "m x 128", "m x 128", "m x 10", "1 number")


def there_and_back() -> None:
    """Show it: shapes of values above the operations, shapes of gradients below."""
    scene = Scene(5 * WIDE + 4 * GAP + 4, 196)
    for place, text in enumerate(STATIONS):
        left = _left(place)
        shape = 'rx="5" fill="none" stroke="currentColor"'
        scene.still(f'<rect x="{left}" y="{TOP}" width="{WIDE}" height="42" {shape}/>')
        scene.label(left + WIDE / 2, TOP + 26, text)
    scene.label(2, 12, "values, forward", size=12, anchor="start")
    for place in range(5):
        scene.block(f"value {place}", 76, 28, BLUE)
    scene.block("g", 76, 28, ORANGE)
    for key in ("w1", "b1", "w2", "b2"):
        scene.block(key, 76 if key[0] == "w" else 48, 26, GREEN)
    _play(scene)
    animate(
        scene,
        "Blue: values, which stay where they were computed. Orange: the gradient g on its way back. Green: "
        "gradients of the weights and biases.",
        alt="Five boxes in a row: rows, linear, ReLU, linear, loss. Values go from left to right, with "
        "shapes m x 64, m x 128, m x 128, m x 10, and one number. Then a gradient goes back from right to "
        "left, with the shapes of the values. At each linear layer it leaves a gradient for the weights and "
        "one for the bias.",
        pause=1900,
    )


def _play(scene: Scene) -> None:
    seen: dict[str, Any] = {}

    def frame(note: str, g: tuple[int, str] | None = None) -> None:
        back = {} if g is None else {"g": (_left(g[0]) + 16, TOP + 50, g[1], True)}
        scene.frame(note, {**seen, **back})

    notes = (
        "Forward. m rows of 64 pixels come in.",
        "Times w1, plus b1: 128 numbers a row.",
        "Max with 0.",
        "Times w2, plus b2: ten logits a row.",
        "The loss: one number for all rows.",
    )
    for place, note in enumerate(notes):
        seen[f"value {place}"] = (_left(place) + 16, TOP - 36, VALUES[place])
        frame(note)
    frame("Backward. The loss gives the gradient of the logits: it has their shape.", (4, "m x 10"))
    seen["w2"], seen["b2"] = (_left(3) - 12, TOP + 98, "128 x 10"), (_left(3) + 72, TOP + 98, "10")
    frame("The linear layer leaves gradients for w2 and b2, and passes on that by its input.", (3, "m x 128"))
    frame("ReLU lets it pass where its input was positive.", (2, "m x 128"))
    seen["w1"], seen["b1"] = (_left(1) - 12, TOP + 98, "64 x 128"), (_left(1) + 72, TOP + 98, "128")
    frame("Again a linear layer. Nobody asks for the gradient of the pixels.", (1, "m x 64"))
    frame("Each green gradient has the shape of what it belongs to: now a step can be made.")


def _left(place: int) -> int:
    return 2 + (WIDE + GAP) * place
