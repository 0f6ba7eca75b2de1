"""Loads and stores, with the checks of each access: bounds, alignment, unwritten data, races.

**Races are found in `race_faults`**: every access passes by there.

| File | Holds |
|---|---|
| loads_and_stores | ld and st of every state space |
| access | Access: who touches which bytes, and the checks of alignment and bounds |
| races_in_global_memory | History: the last accesses to an array, and whether they are ordered |
| race_faults | finds the access that races with an earlier one, and words the fault |
| async_accesses | the copy engine and wgmma: missing data, missing fences between the proxies |
| undefined_values | registers whose value no lane may use, after a shuffle from a missing lane |
| descriptors | how tiles lie in shared memory: swizzles, and wgmma's descriptors |
"""
