"""Balanced order of a batch for its mini-batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.data import DataProto
from megarl.trainer.ppo_trainer import PPOTrainer

ANSWERS, PROMPTS = 2, 96


def batch_of(**meta):
    lengths = torch.tensor(np.sort(np.random.default_rng(0).integers(1, 40, PROMPTS)).repeat(ANSWERS))
    mask = (torch.arange(40) < lengths[:, None]).long()
    uids = [f"p{row // ANSWERS}" for row in range(ANSWERS * PROMPTS)]
    return DataProto.from_dict({"attention_mask": mask}, {"uid": uids}, meta)


def balance(batch, on=True):
    config = SimpleNamespace(trainer=SimpleNamespace(balance_batch=on), samples_per_prompt=ANSWERS)
    return PPOTrainer.balance(SimpleNamespace(config=config), batch)


def prompts_of(batch):
    uids = batch.non_tensor_batch["uid"].tolist()
    assert all(uids[row] == uids[row + 1] for row in range(0, len(uids), ANSWERS))
    return uids[::ANSWERS]


def test_mini_batches_of_actor_and_critic_have_similar_lengths():
    """Two mini-batches of the actor, three of the critic."""
    given = batch_of(actor_mini_batch_rows=96, critic_mini_batch_rows=64)
    after = balance(given)
    assert sorted(prompts_of(after)) == sorted(prompts_of(given)) and after.meta_info == given.meta_info

    def unevenness(batch, rows):
        tokens = [int(part.sum()) for part in batch.tensors["attention_mask"].split(rows)]
        return max(tokens) / min(tokens)

    for rows in (96, 64):
        assert unevenness(after, rows) < 1.1 < 2 < unevenness(given, rows)


@pytest.mark.parametrize(("rows", "on"), [(192, True), (96, False)])
def test_the_order_stays_without_balancing(rows, on):
    given = batch_of(actor_mini_batch_rows=rows)
    assert prompts_of(balance(given, on)) == prompts_of(given)
