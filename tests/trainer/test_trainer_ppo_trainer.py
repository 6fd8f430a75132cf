"""Balanced order of a batch for its mini-batches."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.base.signals import POLL_S, sleep, while_waiting
from megarl.data import DataProto
from megarl.trainer.loop.ppo_trainer import PPOTrainer

ANSWERS, PROMPTS = 2, 96


def test_no_samples_are_received_after_a_failure():
    """Otherwise the shutdown may replace agent runners that have just ended."""
    polls = []

    class Source:
        def batches(self, step, phase):
            with while_waiting(lambda: polls.append(step)):
                yield batch_of(), {}

    def balance(batch):
        sleep(3 * POLL_S)
        assert polls
        polls.clear()
        try:
            raise ConnectionError
        finally:
            sleep(3 * POLL_S)  # as in the end of the other workers

    trainer = SimpleNamespace(start=lambda: [1], phase=lambda name: nullcontext(), balance=balance)
    trainer.phases = SimpleNamespace(samples=Source())
    trainer.config = SimpleNamespace(holds_proximal_policy=False)
    trainer.batches = lambda step: PPOTrainer.batches(trainer, step)
    with pytest.raises(ConnectionError) as failure:
        PPOTrainer.fit(trainer)
    assert failure.traceback  # which holds the frames of the generators
    sleep(3 * POLL_S)
    assert polls == []


def batch_of(**meta):
    lengths = torch.tensor(np.sort(np.random.default_rng(0).integers(1, 40, PROMPTS)).repeat(ANSWERS))
    mask = (torch.arange(40) < lengths[:, None]).long()
    uids = [f"p{row // ANSWERS}" for row in range(ANSWERS * PROMPTS)]
    return DataProto.from_dict({"responses": mask, "attention_mask": mask}, {"uid": uids}, meta)


def balance(batch, on=True, shuffle=False, step=1, seed=7):
    actor = SimpleNamespace(actor=SimpleNamespace(shuffle=shuffle))
    trainer = SimpleNamespace(balance_batch=on, seed=seed)
    config = SimpleNamespace(trainer=trainer, samples_per_prompt=ANSWERS, actor_rollout_ref=actor)
    return PPOTrainer.balance(SimpleNamespace(config=config, state=SimpleNamespace(step=step)), batch)


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


def test_shuffled_samples_depend_on_seed_and_step_alone():
    given = batch_of(actor_mini_batch_rows=96)

    def order(**keys):
        return balance(given, shuffle=True, **keys).non_tensor_batch["uid"].tolist()

    uids = given.non_tensor_batch["uid"].tolist()
    assert sorted(order()) == sorted(uids) and order() != uids
    assert order() == order(on=False) and order() not in (order(step=2), order(seed=8))
    # samples of a prompt are in any mini-batch, as independent draws are: half of the pairs are split, +- 4 sigma
    first = order()[: len(uids) // 2]
    split = sum(first.count(uid) == 1 for uid in set(uids))
    assert abs(split - PROMPTS / 2) < 4 * (PROMPTS / 4) ** 0.5
