"""Models, optimizers, schedules of passes, and weights."""
