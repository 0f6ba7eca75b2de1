"""Checkpoints: the whole state of a training in one directory, for any number of ranks to read.

`save` writes a checkpoint, `load` reads it, and `export` writes the weights alone. `load_pretrained` fills an
engine with weights that others wrote. A checkpoint holds:

    index.json       the step, the settings, and for each tensor its dtype, shape and boxes, each box with
                     its file and first byte there; the length and the CRC-32 of every file, its own included
    rank-00000.bin   boxes of tensors, one after the other, little-endian, row-major, each at a multiple of
    ...              64 bytes; one file for each rank that had something to write

Nothing in it is ever executed; torch.distributed.checkpoint, in contrast, keeps its metadata in a pickle,
which runs code when it is read. Boxes can be read in any other cut, so the ranks and the ZeRO stage may
change. A save writes next to its path, syncs every file and directory to the disk, and renames at the end: at
any moment a path holds a whole checkpoint, or what was there before.

- `saving.py`: `save`, in the foreground or in a thread; who writes which box; the files
- `loading.py`: `load`: check the files, compare them with the model, optimizer and sampler, fill the engine
- `state.py`: what a rank contributes: boxes of tensors, settings, random states
- `values.py`: settings as JSON and back
- `index.py`: write, read and verify the index; read tensors from the files
- `resharding.py`: which stored boxes a rank's own boxes meet, in another cut
- `folders.py`: names in a folder; how a directory gets its name in one step; what is kept
- `exporting.py`: `export` and `state_dict`: the weights alone; safetensors files, tensor by tensor
- `pretrained.py`: `load_pretrained`: weights from safetensors files, in any layout
- `errors.py`: the errors, and how all ranks raise the same one
"""

from minidist.checkpoint.errors import CheckpointError as CheckpointError
from minidist.checkpoint.errors import DamagedCheckpoint as DamagedCheckpoint
from minidist.checkpoint.exporting import export as export
from minidist.checkpoint.exporting import state_dict as state_dict
from minidist.checkpoint.folders import checkpoints as checkpoints
from minidist.checkpoint.loading import Loaded as Loaded
from minidist.checkpoint.loading import load as load
from minidist.checkpoint.pretrained import Differences as Differences
from minidist.checkpoint.pretrained import load_pretrained as load_pretrained
from minidist.checkpoint.saving import Saving as Saving
from minidist.checkpoint.saving import save as save
