"""``python -m megarl.reward_model [--config-name NAME] [KEY=VALUE ...]``: training of a reward model on pairs."""

import sys

from megarl.base.signals import exit_at_once_on_signals

if __name__ == "__main__":
    exit_at_once_on_signals()
    from megarl.cli import run_job

    sys.exit(run_job("reward-model"))
