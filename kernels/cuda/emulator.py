"""The import path of the emulator that lessons and programs use; the code is in `kernels/emulator`."""

from ..emulator import EmulatorError, Fault, Profile, launch, profile, profiled

__all__ = ["EmulatorError", "Fault", "Profile", "launch", "profile", "profiled"]
