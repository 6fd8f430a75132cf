"""Names of models and data sets of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

MODEL_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
DATA_URL = re.compile(r"hf://datasets/(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[^/]+))?/(?P<file>.+)")
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")


def is_model_name(text: str) -> bool:
    """Return whether a model path is a Hub name, ``owner/name`` or ``owner/name@revision``, instead of a local path."""
    return MODEL_NAME.fullmatch(text) is not None and not Path(text).exists()


def is_data_name(text: str) -> bool:
    """Return whether a data file is the Hub name of a data set, instead of a local path."""
    return is_model_name(text) and not text.endswith(DATA_SUFFIXES)


def is_data_url(text: str) -> bool:
    """Return whether a data file is one of the Hub, ``hf://datasets/owner/name/file``."""
    return text.startswith("hf://")
