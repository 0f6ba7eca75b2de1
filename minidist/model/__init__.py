"""Models and their loss, data sets, and the sampler that deals rows to ranks.

| File | Holds |
|---|---|
| data.py | handwritten digits, and the standard library's source as bytes; fixed splits |
| sampler.py | the same global batches for any number of ranks |
| configs.py | the shapes of GPT and BERT by name, with their parameter counts |
| mlp.py, gpt.py, bert.py | an MLP, a GPT and a BERT, each a chain of layers |
| blocks.py | the layers of a GPT |
| seeding.py | first weights that depend only on a seed and a name |
| loss.py | cross-entropy and accuracy, also of masked tokens alone |
| matmul.py | a linear layer that runs on any rung of the matmul ladders |

`minidist.model.matmul` loads the ladders, so import it by its full name where you need it.
"""

from minidist.model.bert import BERT
from minidist.model.configs import CONFIGS, BERTConfig, GPTConfig, TransformerConfig, config
from minidist.model.data import (
    DATASETS,
    Corpus,
    Dataset,
    Rows,
    dataset,
    digits,
    masked,
    stdlib_bytes,
    windows,
)
from minidist.model.gpt import GPT, gpt_layers
from minidist.model.loss import accuracy, cross_entropy, masked_accuracy, masked_cross_entropy
from minidist.model.mlp import MLP
from minidist.model.sampler import Sampler

__all__ = [
    "BERT",
    "CONFIGS",
    "DATASETS",
    "GPT",
    "MLP",
    "BERTConfig",
    "Corpus",
    "Dataset",
    "GPTConfig",
    "Rows",
    "Sampler",
    "TransformerConfig",
    "accuracy",
    "config",
    "cross_entropy",
    "dataset",
    "digits",
    "gpt_layers",
    "masked",
    "masked_accuracy",
    "masked_cross_entropy",
    "stdlib_bytes",
    "windows",
]
