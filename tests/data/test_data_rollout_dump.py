"""Round trip of a rollout dump."""

from dataclasses import asdict

import numpy as np
import torch

from megarl.data import DataProto
from megarl.data.rollout_dump import DumpMetadata, RolloutDump


def test_rollout_dump_round_trip(tmp_path):
    batch = DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 1, 2], [3, 4, 5]]),
            "responses": torch.tensor([[6, 7], [8, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
            "generated_mask": torch.tensor([[1, 0], [1, 0]]),
            "rollout_log_probs": torch.tensor([[-1.0, 0.0], [-2.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.5, -9.0], [-2.5, 0.0]]),
        },
        {"weight_version": [3, 4]},
    )
    facts = DumpMetadata(7, 0.7, "embedded", "bfloat16", "float32")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "7.npz").write_bytes(RolloutDump.of(batch, facts).encoded())
    read = RolloutDump.load(tmp_path / "new" / "7.npz")
    assert asdict(read.metadata) == asdict(facts) and len(read) == 2
    expected = {
        "prompts": [[1, 2], [3, 4, 5]],
        "responses": [[6, 7], [8]],
        "generated": [[1, 0], [1]],
        "rollout_log_probs": [[-1.0, 0.0], [-2.0]],
        "old_log_probs": [[-1.5, -9.0], [-2.5]],
    }
    assert {name: [row.tolist() for row in getattr(read, name)] for name in expected} == expected
    assert read.weight_versions.tolist() == [3, 4]
    assert read.support is None
    support = torch.tensor([[[6, 1], [-1, -1]], [[8, -1], [-1, -1]]], dtype=torch.int32)
    (tmp_path / "8.npz").write_bytes(RolloutDump.of(batch.with_columns({"support_ids": support}), facts).encoded())
    assert [row.tolist() for row in RolloutDump.load(tmp_path / "8.npz").support] == [[[6, 1], [-1, -1]], [[8, -1]]]
    plain = batch.select([name for name in batch.tensors if name != "generated_mask"])
    without = RolloutDump.of(DataProto.from_dict(plain.tensors), facts)
    assert np.all(np.concatenate(without.generated)) and without.weight_versions.tolist() == [-1, -1]
