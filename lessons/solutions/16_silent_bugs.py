"""Solutions of lesson 16: the lines that each page needs, by the text of those whose places they take."""

from __future__ import annotations


def case_1() -> dict[str, str]:
    """Weigh each rank's mean by its rows."""
    return {
        "loss = loss_of(model(inputs), targets) / ranks":
            "loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])"
    }  # fmt: skip


def case_2() -> dict[str, str]:
    """Add up the gradients of norms as well: each rank has seen its own tokens."""
    return {"if p not in parts and not isinstance(layer, nn.LayerNorm):": "if p not in parts:"}


def case_3() -> dict[str, str]:
    """Free a layer when its forward pass is done, and when its backward pass is done."""
    return {
        "output.register_hook(lambda gradient: self.gather())":
            "self.free()\noutput.register_hook(lambda gradient: self.gather())",
        "self.reduce()": "self.reduce()\nif not self.keep.parameters:\n    self.free()",
    }  # fmt: skip


def case_4() -> dict[str, str]:
    """Compute scores of blocks that this rank's tokens see, and of no others."""
    scores = "s, before = scores(q, k_here, owner == rank), log_sum"
    softmax = "p = (scores(q, k_here, owner == rank) - log_sum).exp()  # softmax(s)"
    return {
        scores: f"if owner <= rank:\n    {scores}",
        "if owner <= rank:  # later ranks have later tokens, which this rank's do not see": "",
        softmax: f"if owner <= rank:\n    {softmax}",
        "if owner <= rank:": "",
    }


def case_5() -> dict[str, str]:
    """Count the experts of all ranks."""
    return {
        "squares = sum(p.grad.square().sum() for p in own)":
            "squares = comm.all_reduce(sum(p.grad.square().sum() for p in own))"
    }  # fmt: skip


def case_6() -> dict[str, str]:
    """Save each generator's state from the rank that has used it."""
    return {"comm.broadcast(states[i], 0)": "comm.broadcast(states[i], i % ranks)"}
