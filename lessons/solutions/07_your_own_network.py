"""Solutions of lesson 7.

Backpropagation is Rumelhart, Hinton and Williams 1986, "Learning representations by back-propagating errors".
"""

from __future__ import annotations

import numpy as np


def numerical_gradient(loss, x, h=1e-5):
    """How much loss() changes with each element of x, by trying: central differences."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        before = x[i]
        x[i] = before + h
        above = loss()
        x[i] = before - h
        below = loss()
        x[i] = before  # kept, since (before + h) - h is not always before
        gradient[i] = (above - below) / (2 * h)
    return gradient


def relu_backward(x, g):
    """Gradient of x in max(x, 0), from the gradient g of its result."""
    return g * (x > 0)


def linear_backward(x, w, g, matmul):
    """Gradients of x, w and b in y = x w + b, from the gradient g of y: two products."""
    return matmul(g, w.T), matmul(x.T, g), g.sum(axis=0)


def softmax_cross_entropy(logits, targets):
    """The mean loss over the rows, and its gradient of the logits; finite for finite logits."""
    rows = np.arange(len(logits))
    shifted = logits - logits.max(axis=1, keepdims=True)  # the largest is 0: exp is at most 1
    exp = np.exp(shifted)
    total = exp.sum(axis=1, keepdims=True)  # at least 1
    loss = np.mean(np.log(total[:, 0]) - shifted[rows, targets])
    gradient = exp / total
    gradient[rows, targets] -= 1
    return loss, gradient / len(logits)


def sgd_step(parameters, gradients, rate):
    """Move each parameter against its gradient, in place."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter -= rate * gradient
