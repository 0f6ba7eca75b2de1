"""PTX as a program: the reader, instructions and operands, and what can be seen before it runs."""
