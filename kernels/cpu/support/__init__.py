"""The parts that the upper rungs of the CPU ladder build on.

| File | Holds |
|---|---|
| caches | the sizes of this machine's caches |
| vector_unit | the width and number of its vector registers |
| compiling | compiles a rung's loops at the first call, and keeps the machine code |
| vector_instructions | vector operations in LLVM's language |
| vector_moves | addresses in arrays, and moves of whole vectors |
| register_tile | the innermost loop of rungs 6 and 7 |
| block_sizes | how large packed blocks and threads' parts are, and the memory of blocks |
| packed_product | packs blocks, and multiplies packed ones |
| small_products | multiplies without packing what packing would only make slower |
| one_thread | a product in one thread, compiled once for rungs 6 and 7 |
| shared_packing | a b that all threads pack, and products with it |
| thread_pool, board, atomic | threads, the board where they find a product, and its counters |
| bf16_instructions, instruction_trial | which instructions for bf16 numbers this CPU has, found by trying |
| bf16_packing | numbers as pairs of bf16, and in parts |
| bf16_product, bf16_posting | the loops of rung 8 around the tile, and how its products are posted |
| tile_registers | the eight tiles of AMX, and the loop that multiplies them |
"""
