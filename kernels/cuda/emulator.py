"""The emulator under the import path of lessons and programs; the code is in `kernels/emulator`."""

from ..emulator import EmulatorError, Fault, Profile, launch, profile, profiled

__all__ = ["EmulatorError", "Fault", "Profile", "launch", "profile", "profiled"]
