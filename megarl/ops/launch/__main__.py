"""``python -m megarl.ops.launch``: the same as ``megarl launch``."""

import sys

from megarl.ops.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
