"""Checks beyond those of a load or a store: asynchronous accesses.

A GPU shows these mistakes rarely; the emulator reports each one.

| File | Holds |
|---|---|
| async_accesses | the copy engine and wgmma: missing data, races, missing fences between the proxies |
"""
