"""Says what is wrong: with a machine before a run, and with what a run has left behind."""
