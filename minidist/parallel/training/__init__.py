"""Parts of a training step for every strategy: number formats, clipping, memory, random numbers.

To add an activation checkpoint policy, start at contract/recompute_policies.py.

| File | Holds |
|---|---|
| recompute.py | `recompute`: activations that are computed again in the backward pass |
| activation_memory.py | a counter of the activations that the forward pass keeps |
| comparable_steps.py | for comparisons: no random numbers; what rounding changes; how far tensors are apart |
| precision.py | bf16 and fp16: what is converted; the scale of the loss |
| fp8.py | FP8, emulated: what the products of linear layers round, and how it is scaled |
| bf16_on_cpu.py | whether this CPU survives products in bfloat16, and the variable that helps |
| master_weights.py | an optimizer that updates float32 copies of 16-bit parameters |
| elementwise_optimizers.py | which optimizers may update a part of a parameter |
| muon.py | `Muon`: hidden matrices move by their orthogonalized momentum |
| clipping.py | the norm of all gradients over all ranks, and the factor that shortens them |
| batch_norm.py | BatchNorm statistics over all ranks' rows; averages of each rank's own |
| random_state.py | random numbers that are the same, or different, on tensor-parallel ranks |
"""
