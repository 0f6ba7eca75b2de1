"""What is refused before training starts, and what ranks must agree on."""
