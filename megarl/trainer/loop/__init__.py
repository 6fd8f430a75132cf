"""The training loop and its recorders."""
