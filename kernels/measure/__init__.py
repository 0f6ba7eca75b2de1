"""Check a product, time it, and compare its speed with what the machine allows. Stands above `cpu/support`.

| File | Holds |
|---|---|
| product_checks | a product's inputs, reference, error bound, FLOPs and fewest bytes |
| attention_reference | attention's formulas in float64, and a check against them |
| timing_in_turns, gpu_timer | time functions in turns, A B A B; time work on a GPU by its own clock |
| peaks | what bounds a kernel on one machine, as data |
| cpu_peaks, peak_loops | measure a CPU's peaks |
| gpu_peaks | measures a GPU's peaks |
| peaks_file | keeps measured peaks in the user's cache folder |
| points | a product on the roofline: its time and intensity |
| roofline | the roofline: `measure`, `attainable`, `place`, `plot`, and the command |
| roofline_plot | draws it |
"""
