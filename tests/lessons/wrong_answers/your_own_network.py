"""Wrong answers to lesson 7."""

import numpy as np

from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("numerical_gradient", "the sum of a x^2", "the gradient is wrong", "expected", "got")
def goes_one_way_only(loss, x, h=1e-5):
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        before, here = x[i], loss()
        x[i] = before + h
        gradient[i] = (loss() - here) / h
        x[i] = before
    return gradient


@WRONG.to("numerical_gradient", "x of shape (1,)", "expected", "got")
def divides_by_h(loss, x, h=1e-5):
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        before = x[i]
        x[i] = before + h
        above = loss()
        x[i] = before - h
        below = loss()
        x[i] = before
        gradient[i] = (above - below) / h
    return gradient


@WRONG.to("numerical_gradient", "x is not what it was", "put it back")
def leaves_x_moved(loss, x, h=1e-5):
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        x[i] += h
        above = loss()
        x[i] -= 2 * h
        below = loss()
        gradient[i] = (above - below) / (2 * h)
    return gradient


@WRONG.to("numerical_gradient", "x of shape (3,)", "expected", "got")
def moves_all_at_once(loss, x, h=1e-5):
    kept = x.copy()
    x[...] = kept + h
    above = loss()
    x[...] = kept - h
    below = loss()
    x[...] = kept
    return np.full_like(x, (above - below) / (2 * h))


@WRONG.over_par("numerical_gradient", "It passes, above par in calls of loss", "two for each element")
def asks_in_the_middle_too(loss, x, h=1e-5):
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        before, here = x[i], loss()
        x[i] = before + h
        right = (loss() - here) / h
        x[i] = before - h
        left = (here - loss()) / h
        x[i] = before
        gradient[i] = (left + right) / 2
    return gradient


@WRONG.to("relu_backward", "is wrong from element", "expected", "got")
def is_the_forward_pass(x, g):
    return np.maximum(x, 0)


@WRONG.to("relu_backward", "is wrong from element", "expected", "got")
def looks_at_the_gradient(x, g):
    return np.maximum(g, 0)


@WRONG.to("relu_backward", "is wrong from element 2", "expected", "got")
def lets_zero_through(x, g):
    return g * (x >= 0)


@WRONG.to("relu_backward", "is None", "return")
def changes_g_and_returns_nothing(x, g):
    g[x <= 0] = 0
    return


@WRONG.to("linear_backward", "raised ValueError", "do not fit", "line")
def does_not_transpose(x, w, g, matmul):
    return matmul(g, w), matmul(x, g), g.sum(axis=0)


@WRONG.to("linear_backward", "the gradient by w has the shape", "and should have")
def gives_the_transposed(x, w, g, matmul):
    return matmul(g, w.T), matmul(g.T, x), g.sum(axis=0)


@WRONG.to("linear_backward", "the gradient by b", "expected", "got")
def takes_the_mean_of_rows(x, w, g, matmul):
    return matmul(g, w.T), matmul(x.T, g), g.mean(axis=0) if len(g) else g.sum(axis=0)


@WRONG.to("linear_backward", "the gradient by b has the shape")
def sums_the_columns(x, w, g, matmul):
    return matmul(g, w.T), matmul(x.T, g), g.sum(axis=1)


@WRONG.to("linear_backward", "calls matmul 0 times", "both products")
def multiplies_by_itself(x, w, g, matmul):
    return g @ w.T, x.T @ g, g.sum(axis=0)


@WRONG.over_par("linear_backward", "It passes, above par in products", "the gradient by b is a sum")
def multiplies_by_ones(x, w, g, matmul):
    return matmul(g, w.T), matmul(x.T, g), matmul(np.ones((1, len(g))), g)[0]


def share(logits):
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


@WRONG.to("softmax_cross_entropy", "logits between", "the loss is wrong", "expected", "got      nan")
def takes_exp_at_once(logits, targets):
    rows = np.arange(len(logits))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(p[rows, targets]).mean()
    p[rows, targets] -= 1
    return loss, p / len(logits)


@WRONG.to("softmax_cross_entropy", "the loss is wrong", "expected", "got      inf")
def takes_the_log_of_nothing(logits, targets):
    rows, p = np.arange(len(logits)), share(logits)
    loss = -np.log(p[rows, targets]).mean()
    p[rows, targets] -= 1
    return loss, p / len(logits)


@WRONG.to("softmax_cross_entropy", "3 x 4 logits", "the gradient is wrong", "expected", "got")
def forgets_the_mean(logits, targets):
    rows, p = np.arange(len(logits)), share(logits)
    loss = -np.log(p[rows, targets]).mean()
    p[rows, targets] -= 1
    return loss, p


@WRONG.to("softmax_cross_entropy", "the gradient is wrong", "expected", "got")
def subtracts_in_all_rows(logits, targets):
    rows, p = np.arange(len(logits)), share(logits)
    loss = -np.log(p[rows, targets]).mean()
    p[:, targets] -= 1
    return loss, p / len(logits)


@WRONG.to("softmax_cross_entropy", "should be one number")
def returns_a_loss_for_each_row(logits, targets):
    rows, p = np.arange(len(logits)), share(logits)
    losses = -np.log(p[rows, targets])
    p[rows, targets] -= 1
    return losses, p / len(logits)


@WRONG.to("sgd_step", "parameter 0 afterwards is wrong", "expected", "got")
def gives_the_name_to_another(parameters, gradients, rate):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter = parameter - rate * gradient
    return parameters


@WRONG.to("sgd_step", "parameter 0 afterwards is wrong", "expected", "got")
def goes_uphill(parameters, gradients, rate):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter += rate * gradient


@WRONG.to("sgd_step", "parameter 0 afterwards is wrong", "expected", "got")
def puts_new_arrays_into_the_list(parameters, gradients, rate):
    for i, gradient in enumerate(gradients):
        parameters[i] = parameters[i] - rate * gradient


@WRONG.to("sgd_step", "With a rate of 0.5", "parameter 0 afterwards is wrong")
def forgets_the_rate(parameters, gradients, rate):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter -= gradient


@WRONG.to("relu_backward", "returns what it should, but changes g", "a new array")
def writes_into_g(x, g):
    g[x <= 0] = 0
    return g


@WRONG.to("softmax_cross_entropy", "returns what it should, but changes logits")
def shifts_the_logits_in_place(logits, targets):
    logits -= logits.max(axis=1, keepdims=True)
    exp, rows = np.exp(logits), np.arange(len(logits))
    total = exp.sum(axis=1, keepdims=True)
    loss = np.mean(np.log(total[:, 0]) - logits[rows, targets])
    gradient = exp / total
    gradient[rows, targets] -= 1
    return loss, gradient / len(logits)


@WRONG.to("linear_backward", "returns what it should, but changes g")
def adds_up_in_g(x, w, g, matmul):
    by_x, by_w = matmul(g, w.T), matmul(x.T, g)
    for i in range(1, len(g)):
        g[0] += g[i]
    return by_x, by_w, g.sum(axis=0) if len(g) == 0 else g[0].copy()


@WRONG.to("sgd_step", "gradient 0, which should stay as it was", "expected", "got")
def multiplies_the_gradients_in_place(parameters, gradients, rate):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        gradient *= rate
        parameter -= gradient


@WRONG.to("numerical_gradient", "a transposed x of shape (2, 3)", "the gradient is wrong", "expected", "got")
def has_a_step_of_its_own(loss, x, h=1e-5):
    gradient, h = np.zeros_like(x), 1e-5
    for i in np.ndindex(x.shape):
        before = x[i]
        x[i] = before + h
        above = loss()
        x[i] = before - h
        below = loss()
        x[i] = before
        gradient[i] = (above - below) / (2 * h)
    return gradient


@WRONG.to("numerical_gradient", "a transposed x of shape (2, 3)", "the gradient is wrong", "got      0")
def changes_a_flat_copy(loss, x, h=1e-5):
    flat, gradient = x.reshape(-1), np.zeros(x.size)
    for i in range(x.size):
        before = flat[i]
        flat[i] = before + h
        above = loss()
        flat[i] = before - h
        below = loss()
        flat[i] = before
        gradient[i] = (above - below) / (2 * h)
    return gradient.reshape(x.shape)


@WRONG.to("sgd_step", "parameter 0 afterwards is wrong", "arrays of shapes (2, 3), (3,)")
def changes_flat_copies(parameters, gradients, rate):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        flat = parameter.reshape(-1)
        flat -= rate * gradient.reshape(-1)
