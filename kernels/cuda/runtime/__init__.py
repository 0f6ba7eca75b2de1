"""How a kernel gets to run: device or emulator, compiler, cache, driver, memory, launch."""
