"""torch's encoder layers with a cut MLP: training and evaluation as in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import vectors
from tests.helpers.on_ranks import on_ranks

PLAN = {"encoder.layers.*.linear1": "column", "encoder.layers.*.linear2": "row"}
SECOND = {"encoder.layers.1.linear1": "column", "encoder.layers.1.linear2": "row"}


class Classifier(nn.Module):
    """An encoder of rows whose last two tokens may be padding, which the result does not depend on."""

    def __init__(self, seed: int, padded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(8, 2, 14, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder, self.head, self.padded = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4), padded
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 8) -> (B, 4)
        mask = (torch.arange(5) > 2).expand(len(x), -1) if self.padded else None
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, :3].mean(1))


rows = partial(vectors, width=8, length=5, classes=4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("plan", "padded", "layout"),
    [
        (PLAN, False, "dp=2,tp=2,zero=1"),
        (PLAN, True, "tp=2"),
        (SECOND, False, "tp=2"),
        (None, False, "tp=2"),  # which finds the plan
        (SECOND, True, "dp=2,tp=2,zero=1"),
    ],
    ids=str,
)
def test_evaluation_and_training_are_those_of_one_process(
    cluster_of: Clusters, layout: str, padded: bool, plan: dict[str, str] | None
) -> None:
    sgd, model = partial(torch.optim.SGD, lr=0.1), partial(Classifier, padded=padded)
    case = contract.Case(model, rows, sgd, batches=(4, 4, 4), evaluates=True)
    contract.check(cluster_of, case, layout, plan=plan)


@on_ranks(2)
def test_a_model_that_is_not_cut_keeps_its_fast_path() -> None:
    model = Classifier(0)
    parallelize(model, SECOND)
    layers = [layer.activation_relu_or_gelu for layer in model.encoder.layers]
    with pytest.raises(TypeError, match=r"out_proj with style 'row': .* reads its out_proj's weight itself"):
        md.prepare(model_again := Classifier(0), torch.optim.SGD, md.Layout(tp=2), plan=OUT)
    assert layers == [Classifier(0).encoder.layers[0].activation_relu_or_gelu, 0]
    assert not model.encoder.use_nested_tensor
    assert model_again.encoder.use_nested_tensor


OUT = {"encoder.layers.*.self_attn.out_proj": "row"}
