"""Models and their loss, data sets, and the sampler that deals rows to ranks.

| File | Holds |
|---|---|
| data.py | handwritten digits, and the standard library's source as bytes; fixed splits |
| sampler.py | the same global batches for any number of ranks |
| configs.py | the shapes of GPT and BERT by name, with their parameter counts |
| mlp.py, gpt.py, bert.py | an MLP, a GPT and a BERT, each a chain of layers |
| blocks.py | the layers of a GPT |
| mixture_of_experts.py | many MLPs, and a router that picks some for each token |
| seeding.py | first weights that depend only on a seed and a name; random streams of a seed |
| loss.py | cross-entropy and accuracy, also of masked tokens alone |
| matmul.py, attention.py | a linear layer, and a GPT's attention, that run on any rung of their ladders |

`minidist.model.matmul` loads the ladders, so import it by its full name where you need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.model.bert import BERT as BERT
    from minidist.model.configs import CONFIGS as CONFIGS
    from minidist.model.configs import BERTConfig as BERTConfig
    from minidist.model.configs import GPTConfig as GPTConfig
    from minidist.model.configs import TransformerConfig as TransformerConfig
    from minidist.model.configs import config as config
    from minidist.model.data import DATASETS as DATASETS
    from minidist.model.data import Corpus as Corpus
    from minidist.model.data import Dataset as Dataset
    from minidist.model.data import Rows as Rows
    from minidist.model.data import dataset as dataset
    from minidist.model.data import digits as digits
    from minidist.model.data import masked as masked
    from minidist.model.data import stdlib_bytes as stdlib_bytes
    from minidist.model.data import windows as windows
    from minidist.model.gpt import GPT as GPT
    from minidist.model.gpt import gpt_layers as gpt_layers
    from minidist.model.loss import accuracy as accuracy
    from minidist.model.loss import cross_entropy as cross_entropy
    from minidist.model.loss import masked_accuracy as masked_accuracy
    from minidist.model.loss import masked_cross_entropy as masked_cross_entropy
    from minidist.model.mlp import MLP as MLP
    from minidist.model.sampler import Sampler as Sampler

__getattr__, __dir__, __all__ = lazy(__name__)
