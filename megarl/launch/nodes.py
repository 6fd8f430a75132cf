"""``python -m megarl.launch.nodes``: run on the head, says whether all nodes are there with their devices."""

from __future__ import annotations

import argparse
import json
import sys

from megarl.cluster import RaySession
from megarl.cluster.membership import wait_for_nodes
from megarl.errors import MegarlError


def main() -> int:
    """Waits, then prints the nodes' addresses as JSON, or what is wrong; the exit code says which."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    asked = parser.parse_args()
    try:
        with RaySession():
            print(json.dumps(wait_for_nodes(asked.names, asked.device, asked.devices, asked.timeout_s)))
    except MegarlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
