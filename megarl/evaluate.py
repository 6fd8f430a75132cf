"""``python -m megarl.evaluate [--config-name NAME] [KEY=VALUE ...]``: metrics of a policy on held-out prompts."""

import sys

from megarl.cli import run_job

if __name__ == "__main__":
    sys.exit(run_job("evaluate"))
