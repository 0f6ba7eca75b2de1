"""A backward pass in two parts: first the gradients of the inputs, later the gradients of the weights.

A layer's two gradients depend on the gradient of its output, not on each other, and the stage before waits
only for the input's gradient. In autograd's graph, the operations between a stage's outputs and its inputs
are the trunk. Where the trunk branches off to a weight, the first part notes the gradient that arrives. The
second part continues from the notes, with one call of the autograd engine for each such operation. Nothing is
computed twice, but a hook on an activation runs in both parts, on the same gradient.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """The backward pass of one micro-batch through one stage, in two calls.

    Some gradients are computed in the first part and only added in the second: of parameters that the stage
    uses several times, and of parameters in a Python autograd function, which computes all its gradients at
    once.

    Args:
        roots: the edges of the stage's outputs, or of the loss.
        xs: the stage's inputs that need a gradient, which are leaves.
        at_once: compute all gradients in the first part: for a stage that recomputes activations, which a
            second pass through the graph would do again.
    """

    def __init__(self, roots: Sequence[GradientEdge], xs: Sequence[Tensor], at_once: bool = False) -> None:
        self._roots, self._xs, self._at_once = roots, xs, at_once
        self._notes: list[tuple[list[Tensor], list[tuple[GradientEdge, Tensor | None]]]] = []
        self._ready: list[tuple[Tensor, Tensor]] = []

    def input_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first part: the inputs' gradients, from the outputs' gradients or, for a loss, from None."""
        trunk = _trunk([root.node for root in self._roots], [get_gradient_edge(x).node for x in self._xs])
        leaves: dict[Node, list[Tensor]] = {}
        branches = [(node, _weights(node, trunk, leaves)) for node in trunk]
        pairs = [pair for pair in zip(self._roots, gradients, strict=True) if pair[0].node not in trunk]
        beside = [(pair, _leaves(pair[0].node, leaves)) for pair in pairs]  # outputs that depend on no input
        uses = Counter(id(weight) for _, own in (*branches, *beside) for weight in own)
        at_once: dict[int, Tensor] = {}

        def later(weights: Sequence[Tensor], whole: bool = False) -> list[Tensor]:
            """The weights whose gradients wait for the second part; the others go to `at_once`."""
            own = [w for w in weights if uses[id(w)] == 1 and not whole and not self._at_once]
            at_once.update({id(w): w for w in weights if all(w is not each for each in own)})
            return own

        self._notes = [(later(weights), [pair]) for pair, weights in beside]
        noted = [(node, later(own, isinstance(node, BackwardCFunction))) for node, own in branches]
        edges = [
            [GradientEdge(n, i) for i in range(len(n._input_metadata))] if own else [] for n, own in noted
        ]
        wanted: Any = [*self._xs, *at_once.values(), *chain(*edges)]  # torch takes both kinds in one list
        if not wanted:
            return []
        keep = not self._at_once
        found = iter(
            torch.autograd.grad(self._roots, wanted, gradients, retain_graph=keep, allow_unused=True)
        )
        of_inputs = [next(found) for _ in self._xs]
        ready = [(weight, next(found)) for weight in at_once.values()]
        self._ready = [(weight, gradient) for weight, gradient in ready if gradient is not None]
        # The notes hold gradients before hooks on activations change them, since the hooks run again.
        for (_, own), each in zip(noted, edges, strict=True):
            arrived = [(edge, next(found)) for edge in each]
            self._notes.append((own, [(edge, note) for edge, note in arrived if note is not None]))
        return of_inputs

    def weight_gradients(self) -> None:
        """The second part: add the gradients of the weights to `.grad`, as a whole backward pass would."""
        for weights, notes in self._notes:
            if weights and notes:
                torch.autograd.backward([e for e, _ in notes], [g for _, g in notes], inputs=weights)
        for weight, gradient in self._ready:
            torch.autograd.backward([weight], [gradient])
        self._notes, self._ready = [], []


def _trunk(roots: Sequence[Node], xs: Sequence[Node]) -> dict[Node, None]:
    """The operations between outputs and inputs.

    Their order follows from the graph alone and is the same on all ranks: branches may hold collectives.
    """
    trunk = dict.fromkeys(xs)
    seen, stack = {*xs}, [(root, False) for root in reversed(roots)]
    while stack:
        node, below_done = stack.pop()
        below = [each for each, _ in node.next_functions if each is not None]
        if below_done:
            if any(each in trunk for each in below):
                trunk[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(each, False) for each in below if each not in seen]
    return trunk


def _weights(node: Node, trunk: Container[Node], known: dict[Node, list[Tensor]]) -> list[Tensor]:
    """The leaves below an operation of the trunk that are reached outside the trunk, each once."""
    found: dict[int, Tensor] = {}
    for below, _ in node.next_functions:
        if below is not None and below not in trunk:
            found.update({id(leaf): leaf for leaf in _leaves(below, known)})
    return [*found.values()]


def _leaves(node: Node, known: dict[Node, list[Tensor]]) -> list[Tensor]:
    if node not in known:
        variable = getattr(node, "variable", None)
        known[node] = [variable] if variable is not None else _weights(node, (), known)
    return known[node]
