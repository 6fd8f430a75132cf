"""``python -m megarl.sft [--config-name NAME] [KEY=VALUE ...]``: supervised fine-tuning."""

import sys

from megarl.cli import run_job

if __name__ == "__main__":
    sys.exit(run_job("sft"))
