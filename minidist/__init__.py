"""minidist: from three loops that multiply matrices to ZeRO and 3-D parallel training.

>>> import minidist as md
>>> md.launch(md.rank, ranks=4)
[0, 1, 2, 3]

Names are imported when first used: `import minidist` itself does not even import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minidist import comm as comm
    from minidist import kernels as kernels
    from minidist.checkpoint import CheckpointError as CheckpointError
    from minidist.checkpoint import DamagedCheckpoint as DamagedCheckpoint
    from minidist.checkpoint import export as export
    from minidist.checkpoint import load as load
    from minidist.checkpoint import save as save
    from minidist.comm.cluster import Cluster as Cluster
    from minidist.comm.errors import CollectiveError as CollectiveError
    from minidist.comm.errors import OutOfSync as OutOfSync
    from minidist.comm.errors import RankDied as RankDied
    from minidist.comm.errors import RankError as RankError
    from minidist.comm.errors import RankTimeout as RankTimeout
    from minidist.comm.launch import launch as launch
    from minidist.comm.world import init as init
    from minidist.comm.world import local_rank as local_rank
    from minidist.comm.world import rank as rank
    from minidist.comm.world import shutdown as shutdown
    from minidist.comm.world import size as size
    from minidist.model.loss import cross_entropy as cross_entropy
    from minidist.parallel.column_parallel import ColumnParallelLinear as ColumnParallelLinear
    from minidist.parallel.compare import compare as compare
    from minidist.parallel.compression import Cast as Cast
    from minidist.parallel.data_parallel import DataParallel as DataParallel
    from minidist.parallel.engine import Engine as Engine
    from minidist.parallel.fully_shard import FullyShard as FullyShard
    from minidist.parallel.in_sync import assert_in_sync as assert_in_sync
    from minidist.parallel.layerwise import LayerByLayer as LayerByLayer
    from minidist.parallel.layout import Layout as Layout
    from minidist.parallel.local_sgd import LocalSGD as LocalSGD
    from minidist.parallel.parameter_server import ParameterServer as ParameterServer
    from minidist.parallel.pipeline import Pipeline as Pipeline
    from minidist.parallel.power_sgd import PowerSGD as PowerSGD
    from minidist.parallel.prepare import prepare as prepare
    from minidist.parallel.row_parallel import RowParallelLinear as RowParallelLinear
    from minidist.parallel.top_k import TopK as TopK
    from minidist.parallel.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
    from minidist.parallel.vocabulary import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from minidist.parallel.zero import ZeroOptimizer as ZeroOptimizer

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "minidist.comm": (),
        "minidist.kernels": (),
        "minidist.checkpoint": ("CheckpointError", "DamagedCheckpoint", "export", "load", "save"),
        "minidist.comm.cluster": ("Cluster",),
        "minidist.comm.errors": ("CollectiveError", "OutOfSync", "RankDied", "RankError", "RankTimeout"),
        "minidist.comm.launch": ("launch",),
        "minidist.comm.world": ("init", "local_rank", "rank", "shutdown", "size"),
        "minidist.model.loss": ("cross_entropy",),
        "minidist.parallel.column_parallel": ("ColumnParallelLinear",),
        "minidist.parallel.compare": ("compare",),
        "minidist.parallel.compression": ("Cast",),
        "minidist.parallel.data_parallel": ("DataParallel",),
        "minidist.parallel.engine": ("Engine",),
        "minidist.parallel.fully_shard": ("FullyShard",),
        "minidist.parallel.in_sync": ("assert_in_sync",),
        "minidist.parallel.layerwise": ("LayerByLayer",),
        "minidist.parallel.layout": ("Layout",),
        "minidist.parallel.local_sgd": ("LocalSGD",),
        "minidist.parallel.parameter_server": ("ParameterServer",),
        "minidist.parallel.pipeline": ("Pipeline",),
        "minidist.parallel.power_sgd": ("PowerSGD",),
        "minidist.parallel.prepare": ("prepare",),
        "minidist.parallel.row_parallel": ("RowParallelLinear",),
        "minidist.parallel.top_k": ("TopK",),
        "minidist.parallel.vocabulary": ("VocabParallelEmbedding", "vocab_parallel_cross_entropy"),
        "minidist.parallel.zero": ("ZeroOptimizer",),
    },
)
