"""Instructions wired to registers and memory."""
