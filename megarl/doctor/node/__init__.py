"""Checks of one machine: does it have what a run needs? No Ray, and no torch unless a check needs it.

A check is a function of :class:`Needs` that returns findings; :func:`examine` calls all of them. What several machines
found is compared in :mod:`megarl.doctor.node.differences`; running the checks on every node is for
:mod:`megarl.cluster.checkup`.
"""

from megarl.doctor.node.examination import examine
from megarl.doctor.node.finding import Finding, NodeReport, Status
from megarl.doctor.node.needs import Needs, needs_of

__all__ = ["Finding", "Needs", "NodeReport", "Status", "examine", "needs_of"]
