"""`prepare` and the step: a rank's part of the model, and where it lies in the whole."""
