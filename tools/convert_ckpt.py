"""Convert checkpoints: ``hf-to-megatron SRC DST``, ``megatron-to-hf SRC DST``, ``inspect DIR``, ``verify A B``."""

import sys

from megarl.convert.command import main

if __name__ == "__main__":
    sys.exit(main(program="convert_ckpt.py"))
