"""``megarl JOB ...`` and ``megarl COMMAND ...``: the entry point, which a signal ends quietly during imports."""

import sys

from megarl.base.signals import exit_at_once_on_signals


def main() -> int:
    """Run the ``megarl`` command; returns its exit code."""
    exit_at_once_on_signals()
    from megarl.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
