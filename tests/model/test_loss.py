"""The loss and the accuracy: over tokens as over rows, against a definition, and no mean of nothing."""

import pytest
import torch
from torch.nn import functional

from minidist.model.loss import accuracy, cross_entropy


def test_a_loss_over_tokens_is_the_loss_over_rows():
    outputs = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (3, 5))
    loss = cross_entropy(outputs, targets)
    torch.testing.assert_close(loss, cross_entropy(outputs.flatten(0, 1), targets.flatten()))
    by_hand = torch.stack(
        [outputs[b, t].logsumexp(0) - outputs[b, t, targets[b, t]] for b in range(3) for t in range(5)]
    )
    torch.testing.assert_close(loss, by_hand.mean())
    (gradient,) = torch.autograd.grad(loss, outputs)
    one_hot = functional.one_hot(targets, 7)
    torch.testing.assert_close(gradient, (outputs.softmax(-1) - one_hot).detach() / 15)
    torch.testing.assert_close(cross_entropy(outputs[0, 0], targets[0, 0]), by_hand[0])


def test_a_narrow_loss_is_computed_in_float32():
    outputs, targets = torch.randn(64, 256), torch.randint(256, (64,))
    narrow = outputs.bfloat16()
    assert cross_entropy(narrow, targets).dtype == torch.float32
    torch.testing.assert_close(cross_entropy(narrow, targets), cross_entropy(narrow.float(), targets))


def test_the_loss_refuses_what_has_no_mean():
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 7\) do not fit targets of shape \(4,\)"):
        cross_entropy(torch.rand(3, 7), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets of shape \(0,\) are empty, and the mean loss"):
        cross_entropy(torch.rand(0, 7), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"targets are torch\.float32"):
        cross_entropy(torch.rand(3, 7), torch.zeros(3))
    with pytest.raises(IndexError):  # torch would leave these rows out, and the mean would be of others
        cross_entropy(torch.rand(3, 7), torch.tensor([0, -100, 1]))


def test_accuracy_is_the_share_that_is_right():
    outputs = torch.eye(4)[torch.tensor([[0, 1], [2, 3]])]
    assert accuracy(outputs, torch.tensor([[0, 1], [2, 0]])).item() == 0.75
    assert accuracy(torch.rand(0, 4), torch.zeros(0, dtype=torch.int64)).isnan()
