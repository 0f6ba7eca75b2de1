"""How a collective travels: shared memory, mailboxes, torch.distributed, and the choice among them."""
