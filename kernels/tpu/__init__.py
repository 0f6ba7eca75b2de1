"""The matrix units of a TPU (cycle by cycle), a GPU (to the last bit) and a CPU. Start with `systolic_array`.

| File | Holds |
|---|---|
| systolic_array | `SystolicArray` and `compare` |
| array | what both dataflows share: tiles, commands, registers that shift |
| weight_stationary, output_stationary | the two dataflows |
| cost_formulas | cycles and memory accesses, as formulas |
| tensor_core | how tensor cores sum and round |
| tiles | the eight tiles of AMX, the matrix unit in a CPU |
"""
