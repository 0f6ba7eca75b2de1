"""Checkpoints: a training's whole state in one directory, whoever wrote it and however many ranks read it.

`save` writes, `load` reads, `export` makes one file of the weights. torch.distributed.checkpoint plans who
writes what and what is read from where; the format is this package's own, since that library's metadata is a
pickle, and a pickle runs code when it is read. A checkpoint is a directory:

    index.json       who, what, where: the step, the settings, and for each tensor its dtype, shape and boxes,
                     each with its place in a file; the bytes and the CRC-32 of every file, its own included
    rank-00000.bin   boxes of tensors, one after the other, little-endian, row-major, each at a multiple of 64
    ...              bytes; one file a rank that had something to write

Nothing in it is ever executed. Boxes are read in any other cut, so that the ranks and the ZeRO stage may
change. A save writes beside its path, has every file and directory synced to the disk, and renames at the
end: at any moment a path holds a whole checkpoint, or what was there before.

`saving.py` and `loading.py` say what happens in which order; `transfer.py` calls
torch.distributed.checkpoint, which calls `planners.py` and `storage.py`; `index.py` reads and checks;
`folders.py` names and renames.
"""

from minidist.checkpoint.errors import CheckpointError as CheckpointError
from minidist.checkpoint.errors import DamagedCheckpoint as DamagedCheckpoint
from minidist.checkpoint.exporting import export as export
from minidist.checkpoint.exporting import state_dict as state_dict
from minidist.checkpoint.folders import checkpoints as checkpoints
from minidist.checkpoint.loading import Loaded as Loaded
from minidist.checkpoint.loading import load as load
from minidist.checkpoint.saving import Saving as Saving
from minidist.checkpoint.saving import save as save
