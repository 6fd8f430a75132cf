"""Planner: memory, FLOPs and relative cost of a job, computed from its configuration before it starts.

Reads the configuration and each model's ``config.json``. Starts no process, needs no GPU and imports no torch.
"""
