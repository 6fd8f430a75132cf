"""Data: batches, data sets, row orders, partition balancing and packing.

Names load on first use, so that :func:`check_files` runs without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.data.balance import balance_mini_batches, balanced_partition, stratified_minibatch_order
    from megarl.data.columns import COLUMNS, NON_TENSOR_COLUMNS, Column, declare_column
    from megarl.data.dataset import RLHFDataset
    from megarl.data.labelled_responses import KTO_COLUMNS, LabelledResponses
    from megarl.data.loader import StatefulLoader
    from megarl.data.packing import check_longest, common_micro_batch_count, fewest_micro_batches, plan_micro_batches
    from megarl.data.protocol import DataProto, sequence_lengths, token_counts
    from megarl.data.rows import check_files
    from megarl.data.sequences import attention_mask_of, pad_left, pad_right
    from megarl.data.supervised_datasets import PairDataset, SFTDataset

_MODULES = {
    "COLUMNS": "columns",
    "KTO_COLUMNS": "labelled_responses",
    "NON_TENSOR_COLUMNS": "columns",
    "Column": "columns",
    "DataProto": "protocol",
    "LabelledResponses": "labelled_responses",
    "PairDataset": "supervised_datasets",
    "RLHFDataset": "dataset",
    "SFTDataset": "supervised_datasets",
    "StatefulLoader": "loader",
    "attention_mask_of": "sequences",
    "balance_mini_batches": "balance",
    "balanced_partition": "balance",
    "check_files": "rows",
    "check_longest": "packing",
    "common_micro_batch_count": "packing",
    "declare_column": "columns",
    "fewest_micro_batches": "packing",
    "pad_left": "sequences",
    "pad_right": "sequences",
    "plan_micro_batches": "packing",
    "sequence_lengths": "protocol",
    "stratified_minibatch_order": "balance",
    "token_counts": "protocol",
}

__all__ = [
    "COLUMNS",
    "KTO_COLUMNS",
    "NON_TENSOR_COLUMNS",
    "Column",
    "DataProto",
    "LabelledResponses",
    "PairDataset",
    "RLHFDataset",
    "SFTDataset",
    "StatefulLoader",
    "attention_mask_of",
    "balance_mini_batches",
    "balanced_partition",
    "check_files",
    "check_longest",
    "common_micro_batch_count",
    "declare_column",
    "fewest_micro_batches",
    "pad_left",
    "pad_right",
    "plan_micro_batches",
    "sequence_lengths",
    "stratified_minibatch_order",
    "token_counts",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
