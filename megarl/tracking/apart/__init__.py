"""Trackers in processes of their own, so that nothing that happens to one happens to the run."""

from megarl.tracking.apart.courier import Courier

__all__ = ["Courier"]
