"""Loads and stores, with the checks of each access: bounds, alignment, unwritten data, races.

The races themselves are found in `machine/races_in_shared_memory.py` and `machine/races_in_global_memory.py`;
`address_checks` calls them and words the fault.

| File | Holds |
|---|---|
| loads_and_stores | ld and st of every state space |
| address_checks | the checks of an access, and the text of its faults |
| async_accesses | the copy engine and wgmma: missing data, races, missing fences between the proxies |
| undefined_values | registers whose value no lane may use, after a shuffle from a missing lane |
| swizzles, descriptors | how tiles lie in shared memory, and how wgmma's descriptors name them |
| array_reshape | array.reshape in a kernel |
"""
