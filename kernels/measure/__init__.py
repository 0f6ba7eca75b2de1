"""How fast a product is, and how fast the machine allows: harness, timers, peaks, roofline."""
