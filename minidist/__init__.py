"""minidist trains a PyTorch model on many ranks, and counts every byte that they send.

>>> import minidist as md
>>> md.launch(md.rank, ranks=4)  # call a function on 4 processes of this machine
[0, 1, 2, 3]

Under torchrun every process first calls `md.init()`. Then choose:
- Any mix of strategies: `engine = md.prepare(model, torch.optim.Adam, md.Layout(dp=2, tp=2))`,
  then `engine.step(inputs, targets)`.
- One strategy in a loop of your own: DataParallel, ZeroOptimizer, FullyShard, Pipeline, LayerByLayer,
  LocalSGD, ParameterServer. With a Coordinator, workers of LocalSGD come and go. Cast, TopK and PowerSGD
  compress gradients; Muon is an optimizer.
- Layers cut between ranks: ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding.
- Checkpoints that load in any layout: save, load, export, load_pretrained. To find a mistake: compare,
  assert_in_sync.
- Collectives by themselves: `md.comm`. Matrix multiplication step by step, on CPU and GPU: `md.kernels`.

Names are imported when first used: `import minidist` itself does not even import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

__version__ = "0.2.0"

if TYPE_CHECKING:
    from minidist import comm as comm
    from minidist import kernels as kernels
    from minidist.checkpoint import CheckpointError as CheckpointError
    from minidist.checkpoint import DamagedCheckpoint as DamagedCheckpoint
    from minidist.checkpoint import export as export
    from minidist.checkpoint import load as load
    from minidist.checkpoint import load_pretrained as load_pretrained
    from minidist.checkpoint import save as save
    from minidist.comm.errors import CollectiveError as CollectiveError
    from minidist.comm.errors import OutOfSync as OutOfSync
    from minidist.comm.errors import RankDied as RankDied
    from minidist.comm.errors import RankError as RankError
    from minidist.comm.errors import RankTimeout as RankTimeout
    from minidist.comm.launching.cluster import Cluster as Cluster
    from minidist.comm.launching.launch import launch as launch
    from minidist.comm.world import init as init
    from minidist.comm.world import local_rank as local_rank
    from minidist.comm.world import rank as rank
    from minidist.comm.world import shutdown as shutdown
    from minidist.comm.world import size as size
    from minidist.model.loss import cross_entropy as cross_entropy
    from minidist.parallel.averaging.coordinator import Coordinator as Coordinator
    from minidist.parallel.averaging.exchanges import nesterov as nesterov
    from minidist.parallel.averaging.local_sgd import LocalSGD as LocalSGD
    from minidist.parallel.averaging.parameter_server import ParameterServer as ParameterServer
    from minidist.parallel.compression.compressor import Cast as Cast
    from minidist.parallel.compression.power_sgd import PowerSGD as PowerSGD
    from minidist.parallel.compression.top_k import TopK as TopK
    from minidist.parallel.contract.layout import Layout as Layout
    from minidist.parallel.debugging.compare import compare as compare
    from minidist.parallel.debugging.in_sync import assert_in_sync as assert_in_sync
    from minidist.parallel.engine.ema import EMA as EMA
    from minidist.parallel.engine.prepare import prepare as prepare
    from minidist.parallel.engine.training_step import Engine as Engine
    from minidist.parallel.layerwise.layer_by_layer import LayerByLayer as LayerByLayer
    from minidist.parallel.pipeline.execution import Pipeline as Pipeline
    from minidist.parallel.sharding.loops.data_parallel import DataParallel as DataParallel
    from minidist.parallel.sharding.loops.fully_shard import FullyShard as FullyShard
    from minidist.parallel.sharding.loops.zero import ZeroOptimizer as ZeroOptimizer
    from minidist.parallel.tensor_parallel.linear_layers import ColumnParallelLinear as ColumnParallelLinear
    from minidist.parallel.tensor_parallel.linear_layers import RowParallelLinear as RowParallelLinear
    from minidist.parallel.tensor_parallel.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
    from minidist.parallel.tensor_parallel.vocabulary import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    )
    from minidist.parallel.training.muon import Muon as Muon

__getattr__, __dir__, __all__ = lazy(__name__)
