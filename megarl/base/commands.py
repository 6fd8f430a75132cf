"""Frame of a command: its errors become lines on standard error and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megarl.base.errors import ConfigError, DataError, MegarlError, ModelError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
"""Exit codes besides 0. argparse ends the process with 2, too."""
BAD_INPUT = (ConfigError, ModelError, DataError)
"""Errors that a repetition of the same command meets again."""


def exit_code(
    action: Callable[[], int],
    bad_input: tuple[type[Exception], ...] = BAD_INPUT,
    interrupted: str = "interrupted",
) -> int:
    """Run a command.

    Args:
        bad_input: errors with the code 2; any other :class:`MegarlError` has 1.

    Returns:
        The exit code: that of the action; 1 or 2 after an error; 130 after Ctrl-C.
    """
    try:
        return action()
    except bad_input as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    except MegarlError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return EXIT_INTERRUPTED
