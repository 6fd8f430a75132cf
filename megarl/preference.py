"""``python -m megarl.preference [--config-name NAME] [KEY=VALUE ...]``: preference optimization (DPO, SimPO, ...)."""

import sys

from megarl.cli import run_job

if __name__ == "__main__":
    sys.exit(run_job("preference"))
