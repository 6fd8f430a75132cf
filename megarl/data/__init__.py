"""Data: batches, data sets, row orders, partition balancing and packing.

Names load on first use, so that :func:`check_files` runs without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.data.balance import (
        balance_mini_batches,
        balanced_partition,
        check_longest,
        common_micro_batch_count,
        fewest_micro_batches,
        plan_micro_batches,
        stratified_minibatch_order,
    )
    from megarl.data.columns import (
        COLUMNS,
        NON_TENSOR_COLUMNS,
        Column,
        attention_mask_of,
        declare_column,
        pad_left,
        pad_right,
    )
    from megarl.data.dataset import RLHFDataset
    from megarl.data.loader import StatefulLoader
    from megarl.data.protocol import DataProto, sequence_lengths, token_counts
    from megarl.data.rows import check_files
    from megarl.data.supervised_datasets import KTO_COLUMNS, LabelledResponses, PairDataset, SFTDataset

_NAMES = {
    "balance": "balance_mini_batches balanced_partition check_longest common_micro_batch_count fewest_micro_batches "
    "plan_micro_batches stratified_minibatch_order",
    "columns": "COLUMNS NON_TENSOR_COLUMNS Column attention_mask_of declare_column pad_left pad_right",
    "dataset": "RLHFDataset",
    "loader": "StatefulLoader",
    "protocol": "DataProto sequence_lengths token_counts",
    "rows": "check_files",
    "supervised_datasets": "KTO_COLUMNS LabelledResponses PairDataset SFTDataset",
}
"""Public names by module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

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
