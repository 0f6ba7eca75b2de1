"""A backward pass in two parts: first the gradient of the input, later those of the weights.

A layer's two gradients depend on the gradient of its output, not on each other, and the stage before waits
for the input's alone. In autograd's graph, the operations between a stage's output and its input are the
trunk. Where the trunk branches off to a weight, the first part notes the gradient that arrives, and the
second part continues from the notes, with one call of the autograd engine for each such operation. Nothing is
computed twice, but a hook on an activation runs in both parts, on the same gradient.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """The backward pass of one micro-batch through one stage, in two calls.

    Some gradients are computed in the first part and only added in the second: those of parameters that the
    stage uses several times, and of those in a Python autograd function, which computes all of its gradients
    at once.

    Args:
        root: the edge of the stage's output, or of the loss.
        x: the stage's input, a leaf. If it is None, for an input that needs no gradient, the second part does
            everything.
        at_once: compute all gradients in the first part: for a stage that recomputes activations, which a
            second pass through the graph would do again.
    """

    def __init__(self, root: GradientEdge, x: Tensor | None, at_once: bool = False) -> None:
        self._root, self._x, self._at_once = root, x, at_once
        self._whole: tuple[Tensor | None] | None = None
        self._notes: list[tuple[list[Tensor], list[tuple[GradientEdge, Tensor]]]] = []
        self._ready: list[tuple[Tensor, Tensor]] = []

    def input_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """The first part: from the gradient of the output, or None for a loss, that of the input, if any."""
        trunk = {} if self._x is None else _trunk(self._root.node, get_gradient_edge(self._x).node)
        if self._x is None or self._root.node not in trunk:
            self._whole = (gradient,)
            return None
        leaves: dict[Node, list[Tensor]] = {}
        branches = {node: _weights(node, trunk, leaves) for node in trunk}
        uses = Counter(id(weight) for weights in branches.values() for weight in weights)
        at_once: dict[int, Tensor] = {}
        later: list[tuple[list[Tensor], list[GradientEdge]]] = []
        for node, weights in branches.items():
            own = [weight for weight in weights if uses[id(weight)] == 1]
            if self._at_once or isinstance(node, BackwardCFunction):
                own = []
            at_once.update({id(weight): weight for weight in weights if all(weight is not w for w in own)})
            if own:
                later.append((own, [GradientEdge(node, i) for i in range(len(node._input_metadata))]))
        edges = [edge for _, each in later for edge in each]
        wanted: Any = [self._x, *at_once.values(), *edges]  # torch takes both kinds in one list
        found, *others = torch.autograd.grad(
            [self._root], wanted, [gradient], retain_graph=True, allow_unused=True
        )
        # The notes hold gradients before hooks on activations change them, since the hooks run again.
        arrived = iter(others[len(at_once) :])
        for own, each in later:
            pairs = [(edge, note) for edge, note in zip(each, arrived, strict=False) if note is not None]
            self._notes.append((own, pairs))
        ready = zip(at_once.values(), others, strict=False)
        self._ready = [(weight, other) for weight, other in ready if other is not None]
        result: Tensor | None = found
        return result

    def weight_gradients(self) -> None:
        """The second part: add the gradients of the weights to `.grad`, as a whole backward pass would."""
        if self._whole is not None:
            torch.autograd.backward([self._root], [*self._whole])
        for weights, pairs in self._notes:
            if pairs:
                torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs], inputs=weights)
        for weight, gradient in self._ready:
            torch.autograd.backward([weight], [gradient])
        self._notes, self._ready, self._whole = [], [], None


def split_backward(
    pairs: Sequence[tuple[GradientEdge, Tensor | None]], xs: Sequence[Tensor], at_once: bool
) -> tuple[SplitBackward, list[Tensor | None]]:
    """Run the first part; returns the inputs' gradients, and the object that runs the second part.

    pairs: the edge of each output of the stage, with its gradient. xs: the stage's inputs. With several
    outputs or inputs, all gradients are computed in the first part.
    """
    if len(pairs) == 1 and len(xs) < 2:
        root, gradient = pairs[0]
        split = SplitBackward(root, xs[0] if xs else None, at_once)
        found = split.input_gradient(gradient)
        return split, [found for _ in xs]
    known: dict[Node, list[Tensor]] = {}
    inputs = {id(x) for x in xs}
    leaves = {id(leaf): leaf for root, _ in pairs for leaf in _leaves(root.node, known)}
    weights = [leaf for each, leaf in leaves.items() if each not in inputs]
    roots, gradients = zip(*pairs, strict=True)
    all_found = torch.autograd.grad(roots, [*xs, *weights], gradients, allow_unused=True)
    split = SplitBackward(roots[0], None)
    ready = zip(weights, all_found[len(xs) :], strict=True)
    split._ready = [(weight, gradient) for weight, gradient in ready if gradient is not None]
    return split, [*all_found[: len(xs)]]


def _trunk(root: Node, x: Node) -> dict[Node, None]:
    """The operations between the output and the input.

    Their order follows from the graph alone and is the same on all ranks: branches may hold collectives.
    """
    trunk: dict[Node, None] = {x: None}
    seen, stack = {x}, [(root, False)]
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
        found = {} if variable is None else {id(variable): variable}
        for below, _ in node.next_functions:
            if below is not None:
                found.update({id(leaf): leaf for leaf in _leaves(below, known)})
        known[node] = [*found.values()]
    return known[node]
