"""The driver: the training loop, its phases, records and state, and the jobs of the command line."""
