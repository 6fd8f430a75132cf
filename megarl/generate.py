"""``python -m megarl.generate [--config-name NAME] [KEY=VALUE ...]``: a policy's answers to prompts."""

import sys

from megarl.cli import run_job

if __name__ == "__main__":
    sys.exit(run_job("generate"))
