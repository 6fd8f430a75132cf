"""``python -m megarl.launch [options] JOB [KEY=VALUE ...]``."""

import sys

from megarl.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
