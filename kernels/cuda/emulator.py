"""The emulator, under the path that lessons and programs import; see the folder `kernels/emulator`."""

from ..emulator import (
    EmulatorError as EmulatorError,
)
from ..emulator import (
    Fault as Fault,
)
from ..emulator import (
    Profile as Profile,
)
from ..emulator import (
    launch as launch,
)
from ..emulator import (
    profile as profile,
)
from ..emulator import (
    profiled as profiled,
)
