"""Which layout to use: candidates, predicted and tried."""
