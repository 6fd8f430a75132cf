"""Convert the original files of GSM8K, MATH, NQ and HotpotQA to parquet rows; see docs/how_to/data.md."""

import sys

from megarl.data.prepare import main

if __name__ == "__main__":
    sys.exit(main())
