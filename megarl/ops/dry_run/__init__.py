"""Dry run (``trainer.dry_run=true``): everything a job does before its first worker starts, without devices and Ray.

:mod:`~megarl.ops.dry_run.parts` lists the parts and implements the shared ones; :mod:`~megarl.ops.dry_run.jobs` adds
those of each job.
"""
