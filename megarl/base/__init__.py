"""Shared helpers, each implemented once: registry, child process, atomic write, seeds, tables, units, logs."""
