"""Only a public import path: the code is in `kernels/emulator/`."""

from ..emulator import EmulatorError, Fault, Profile, launch, profile, profiled

__all__ = ["EmulatorError", "Fault", "Profile", "launch", "profile", "profiled"]
