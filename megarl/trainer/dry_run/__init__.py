"""A run without the model's mathematics: every part of it is gone through on this machine, with no device and no Ray.

:mod:`~megarl.trainer.dry_run.rehearsal` has the list of parts, and those that all jobs that learn have;
``train`` and ``supervised`` have what is particular to each.
"""
