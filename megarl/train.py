"""``python -m megarl.train [--config-name NAME] [KEY=VALUE ...]``: reinforcement learning."""

import sys

from megarl.base.signals import exit_at_once_on_signals

if __name__ == "__main__":
    exit_at_once_on_signals()
    from megarl.cli import run_job

    sys.exit(run_job("train"))
