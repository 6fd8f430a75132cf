"""Rows of data files: parquet in verl's RLHF schema, JSON lines, and Hugging Face data sets; imports no torch.

A row has ``prompt`` (a list of chat messages ``{role, content}``), ``data_source``, ``reward_model`` (a struct with
``ground_truth``), and optionally ``ability``, ``extra_info`` and other columns. Row numbers start at 0 in each file.
"""

from megarl.data.rows.cache import Cache
from megarl.data.rows.reader import Rows, check_files, expand_files
from megarl.data.rows.schema import RLHF_COLUMNS

__all__ = ["RLHF_COLUMNS", "Cache", "Rows", "check_files", "expand_files"]
