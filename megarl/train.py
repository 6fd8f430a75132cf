"""``python -m megarl.train [--config-name NAME] [KEY=VALUE ...]``: reinforcement learning."""

import sys

from megarl.cli import run_job

if __name__ == "__main__":
    sys.exit(run_job("train"))
