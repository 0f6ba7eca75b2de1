"""Who holds what: the table that data parallelism and ZeRO follow from.

Between steps a rank keeps parameters, gradients and optimizer state either whole, or only its share: the 1/n
of the elements that this rank owns.

| | parameters | gradients | optimizer state |
|---|---|---|---|
| data parallelism | whole | whole | whole |
| ZeRO 1 | whole | whole | 1/n |
| ZeRO 2 | whole | 1/n | 1/n |
| ZeRO 3 | 1/n | 1/n | 1/n |

What a step does follows from its row:

- **Gradients** are reduced once a step where they are kept whole: they add up on the rank until the last
  micro-batch. Otherwise every backward pass reduces them, and whole ones are thrown away.
- They are reduced to all ranks (all-reduce) where every rank updates everything, and to the owners
  (reduce-scatter) where each updates its share.
- **Parameters** that are whole are published after an update of shares: one all-gather. Those that are not
  are gathered, unit by unit, before each use, and thrown away after it: a forward pass is a collective.

Source: Rajbhandari et al. 2020, "ZeRO", sections 5 and 7 (the stages, and what each sends).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True)
class Residency:
    """A row of the table: every rank keeps these whole between steps, and its share of the rest.

    A row is made with the names of the columns. Code that asks a row says what the answer means:
    `row.whole_state`, and `not row.whole_state` where each rank keeps its share.
    """

    parameters: bool
    gradients: bool
    state: bool

    whole_parameters = property(attrgetter("parameters"))
    whole_gradients = property(attrgetter("gradients"))
    whole_state = property(attrgetter("state"))

    def __post_init__(self) -> None:
        if self.whole_state and not (self.whole_parameters and self.whole_gradients):
            raise ValueError(
                f"{self} has whole optimizer state, whose step needs whole parameters and gradients; keep "
                "those whole too, or the state in shares"
            )

    def held(self, whole: int, share: int) -> tuple[int, int, int]:
        """Elements of parameters, gradients and state that a rank keeps; of `whole` it owns `share`."""
        parameters, gradients, state = (
            whole if each else share for each in (self.parameters, self.gradients, self.state)
        )
        return parameters, gradients, state

    def reductions(self, passes: int) -> int:
        """How often a step of so many backward passes reduces each gradient."""
        return 1 if self.whole_gradients else passes

    def gathers(self, passes: int) -> int:
        """How often a step of so many forward and backward passes gathers each parameter."""
        if self.whole_state:
            return 0
        return 1 if self.whole_parameters else 2 * passes

    def bytes_sent(self, size: float, ranks: int, passes: int = 1) -> float:
        """Bytes that a rank sends in a step for parameters and gradients of `size` bytes each.

        A gather and a reduction to owners send (n - 1) / n of them, a reduction to all ranks twice as much.
        """
        reduction = 2 if self.whole_state else 1
        return (reduction * self.reductions(passes) + self.gathers(passes)) * size * (ranks - 1) / ranks


DATA_PARALLEL = Residency(parameters=True, gradients=True, state=True)
ZERO_1 = Residency(parameters=True, gradients=True, state=False)
ZERO_2 = Residency(parameters=True, gradients=False, state=False)
ZERO_3 = Residency(parameters=False, gradients=False, state=False)

ROWS = {0: DATA_PARALLEL, 1: ZERO_1, 2: ZERO_2, 3: ZERO_3}
"""The rows by the number that `Layout.zero` and the paper give them. No other code compares these numbers."""
SHARING = [zero for zero, row in ROWS.items() if not row.whole_state]
"""The numbers of the rows in which ranks share something."""


def zero_name(zero: int) -> str:
    """The name of a row of ZeRO; "" where every rank keeps everything."""
    return "" if ROWS[zero].whole_state else f"ZeRO-{zero}"
