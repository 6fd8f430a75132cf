"""The command line ``megarl doctor``, with the nodes of a cluster; without ``--nodes`` it needs no Ray."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.doctor import command
from megarl.doctor.node import Needs, NodeReport


def main(argv: Sequence[str] | None = None) -> int:
    """See :func:`megarl.doctor.command.main`."""
    return command.main(argv, _on_all_nodes)


def _on_all_nodes(needs: Needs, address: str | None) -> list[NodeReport]:
    from megarl.cluster.checkup import examine_nodes

    return examine_nodes(needs, address)
