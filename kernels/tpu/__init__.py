"""A TPU's matrix unit, cycle by cycle, and a GPU's tensor core, to the last bit. Start with `systolic.py`.

| File | Holds |
|---|---|
| systolic | `SystolicArray` and `compare` |
| array | what both dataflows share: tiles, commands, registers that shift |
| weight_stationary, output_stationary | the two dataflows |
| cost_formulas | cycles and memory accesses, as formulas |
| tensor_core | how tensor cores sum and round |
"""
