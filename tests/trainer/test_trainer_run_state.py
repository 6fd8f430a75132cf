"""Run state: due actions, remaining prompts, resume and the end of a run."""

import shlex
import sys
from pathlib import Path

import pytest
import torch
from support.expected_errors import raises

from megarl.algorithms import KL_CONTROLLERS
from megarl.data import DataProto, StatefulLoader
from megarl.data.loader import PromptQueue
from megarl.trainer.state.checkpoint_manifest import Score
from megarl.trainer.state.run_state import (
    RunState,
    checkpoint_store,
    find_resume,
    fingerprints,
    inexact_checkpoints,
    role_contents,
)
from megarl.trainer.state.stopping import StopCondition
from megarl.trainer.state.trainer_state import TrainerState


def loader():
    """10 rows in batches of 3, the last row left out: three batches an epoch."""

    def collate(rows):
        return DataProto.from_dict({"row": torch.tensor(rows)})

    return PromptQueue(StatefulLoader(list(range(10)), 3, collate, seed=5))


def run_state(train_config, total_steps, source):
    return RunState(train_config(), source, KL_CONTROLLERS["fixed"](0.1, 0.1, 1), total_steps, None)


def rows(prompts):
    return prompts.tensors["row"].tolist()


def test_prompts_of_all_epochs_until_the_last_step(train_config):
    state = run_state(train_config, 8, loader())
    seen = []
    for number, prompts in enumerate(state.remaining_prompts(3), start=1):
        assert state.step == number and state.is_last_step == (number == 8)
        assert state.prompts.epoch == (number - 1) // 3
        seen.append(rows(prompts))
    assert len(seen) == 8
    epochs = [[row for batch in seen[start : start + 3] for row in batch] for start in (0, 3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs) and epochs[0] != epochs[1]
    assert list(state.remaining_prompts(3)) == []


@pytest.mark.parametrize("done", [1, 3, 4, 6, 8])
def test_a_resumed_run_gets_the_remaining_prompts(train_config, done):
    whole = [rows(prompts) for prompts in run_state(train_config, 8, loader()).remaining_prompts(3)]
    first = run_state(train_config, 8, loader())
    for _ in first.remaining_prompts(3):
        if first.step == done:
            saved = first.prompts.state_dict()
            break
    second = run_state(train_config, 8, loader())
    second.prompts.load_state_dict(saved)
    second.step = done
    assert [rows(prompts) for prompts in second.remaining_prompts(3)] == whole[done:]
    assert second.step == 8


@pytest.mark.parametrize(
    ("every", "total", "due"),
    [(-1, 7, []), (1, 3, [1, 2, 3]), (3, 7, [3, 6, 7]), (3, 6, [3, 6]), (10, 7, [7])],
)
def test_due_every_n_steps_and_after_the_last(train_config, every, total, due):
    state = run_state(train_config, total, loader())
    found = []
    for state.step in range(1, total + 1):
        if state.due(every):
            found.append(state.step)
    assert found == due


def test_no_checkpoint_starts_at_step_zero(train_config):
    assert find_resume(train_config()) is None


def test_fingerprints_of_the_training_roles(train_config):
    assert set(fingerprints(train_config())) == {"actor", "critic"}
    prints = fingerprints(train_config({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}))
    assert set(prints) == {"actor"} and prints["actor"]["hidden_size"] == 32


SAVING = {"trainer.save_freq": 5, "trainer.test_freq": 1}


def saved(config, step, score=None, **changes):
    contents = {role: checkpoint.save_contents for role, checkpoint in role_contents(config).items()}
    with checkpoint_store(config).saving(step, score) as folder:
        for role in contents:
            (folder / role).mkdir()
            (folder / role / "state.json").write_text("{}", encoding="utf-8")
        values = {"step": step, "epoch": 0, "kl_controller": {}, "dataloader": {}, "model": fingerprints(config)}
        TrainerState(**{**values, "contents": contents, **changes}).write(folder)


@pytest.mark.parametrize(
    ("written", "load_contents", "named"),
    [
        (["model"], ["model"], None),
        (["model", "extra"], None, ["optimizer", "actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]"]),
        (["hf_model"], ["model"], ["no model of the actor", "save_contents=[hf_model]"]),
    ],
)
def test_missing_contents_fail_before_any_process(
    train_config,
    written,
    load_contents,
    named,
):
    key = "actor_rollout_ref.actor.checkpoint"
    saved(train_config({f"{key}.save_contents": written}), 3)
    config = train_config({} if load_contents is None else {f"{key}.load_contents": load_contents})
    if named is None:
        assert find_resume(config).state.step == 3
    else:
        with raises("resume.missing-contents", *named):
            find_resume(config)


def test_ppo_rejects_a_checkpoint_without_critic(train_config):
    saved(train_config({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}), 3)
    with raises("resume.nothing-complete", "global_step_3 holds no critic"):
        find_resume(train_config())


def test_software_versions_are_compared(train_config, caplog):
    saved(train_config(), 3, versions={"torch": "1.0"})
    assert find_resume(train_config()) is not None
    assert "was written by other software versions: torch 1.0 then" in caplog.text


def test_inexact_checkpoints_are_announced(train_config):
    changes = {
        "critic.checkpoint.save_contents": ["model"],
        "actor_rollout_ref.actor.checkpoint.save_contents": ["hf_model"],
    }
    actor, critic = inexact_checkpoints(train_config({**SAVING, **changes}))
    assert "of the actor hold hf_model" in actor and "impossible" in actor
    assert "of the critic hold model" in critic and "restarts its optimizer and extra" in critic
    assert inexact_checkpoints(train_config(changes)) == [] == inexact_checkpoints(train_config(SAVING))


@pytest.mark.parametrize(("mode", "bests"), [("max", [1, 3]), ("min", [1, 2, 4])])
def test_a_new_best_is_saved_between_due_saves(train_config, mode, bests):
    metric = "val-core/x/reward/mean@1"
    config = train_config({**SAVING, "trainer.best_metric": metric, "trainer.best_mode": mode})
    state = RunState(config, loader(), None, 9, None)
    found = []
    for state.step, value in enumerate([0.5, 0.4, 0.6, 0.1], start=1):
        state.note_validation({metric: value, "actor/lr": 1.0})
        if state.must_save():
            found.append(state.step)
            saved(config, state.step, Score(metric, value))
    assert found == bests
    assert state.saver.store.best().step == (3 if mode == "max" else 4)
    state.step = 8
    state.note_validation({"actor/lr": 1.0})  # no validation
    assert not state.must_save()
    state.step = 9
    assert state.must_save()


def test_an_unknown_best_metric_lists_the_metrics(train_config):
    state = RunState(train_config({**SAVING, "trainer.best_metric": "val-core/y"}), loader(), None, 9, None)
    with raises("checkpoint.no-best-metric") as caught:
        state.note_validation({"val-core/x": 1.0})
    assert str(caught.value) == (
        "trainer.best_metric='val-core/y' is not a validation metric of this run; the metrics are: val-core/x "
        "[checkpoint.no-best-metric]"
    )


def test_a_stop_request_ends_after_the_step_and_saves(train_config):
    stop = StopCondition()
    state = RunState(train_config({"trainer.save_freq": 100}), loader(), None, 8, None, stop)
    steps = []
    for _ in state.remaining_prompts(3):
        steps.append(state.step)
        if state.step == 2:
            stop.request("SIGTERM")
        assert state.must_save() == (state.step == 2)
    assert steps == [1, 2] and state.ends
    saved(state.config, 2)
    state.saver.newest = state.saver.store.resolve("auto")
    message = state.finish()
    assert state.stopped == "SIGTERM"
    assert message.startswith(f"Ended after step 2 of 8 (SIGTERM), saved in {state.saver.newest}.")
    assert f"trainer.resume_from_path={state.saver.newest}" in message
    state.check_last_save()
    state.saver.failure = "No space left on device"
    assert "not saved" in state.finish()
    with raises("checkpoint.last-save-failed", "step 2", "No space left on device", state.saver.newest):
        state.check_last_save()


def test_a_reached_target_saves_and_ends_the_run(sft_config):
    state = RunState(sft_config({"trainer.save_freq": 100}), loader(), None, 8, None)
    steps = []
    for _ in state.remaining_prompts(3):
        steps.append(state.step)
        if state.step == 4:
            state.end_here()
        assert state.must_save() == (state.step == 4)
    assert steps == [1, 2, 3, 4] and state.finish() is None


def test_a_stop_request_before_the_first_step(train_config):
    stop = StopCondition()
    stop.request("SIGTERM")
    state = RunState(train_config(), loader(), None, 8, None, stop)
    assert list(state.remaining_prompts(3)) == []
    assert "before the first step (SIGTERM)" in state.finish()


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, []),
        ({"trainer.resume_mode": "disable"}, ["trainer.resume_mode=auto"]),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "x/global_step_1"},
            ["trainer.resume_mode=auto", "trainer.resume_from_path=null"],
        ),
    ],
)
def test_the_command_to_go_on_resumes_from_the_last_save(train_config, monkeypatch, changes, overrides):
    argv = ["/venv/bin/python", "-m", "megarl", "train", "--config-name", "ppo", "data.train_files=[a b.parquet]"]
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    state = RunState(train_config({"trainer.save_freq": 100, **changes}), loader(), None, 8, None)
    state.step, state.stop.reason, state.saver.newest = 3, "Ctrl-C", Path("/c/global_step_3")
    words = shlex.join(["python", *argv[1:], *overrides])
    message = state.finish()
    assert f"Ended after step 3 of 8 (Ctrl-C), saved in /c/global_step_3. To go on:\n  {words}\nor from" in message


def test_an_interruption_without_a_save_says_why(train_config):
    state = RunState(train_config(), loader(), None, 8, None)
    assert "Ended before the first step (Ctrl-C), not saved: trainer.save_freq=-1." in state.describe_interruption()
    state.step = 3
    assert "Ended in step 3 of 8 (Ctrl-C), not saved: trainer.save_freq=-1." in state.describe_interruption()


def test_steps_of_another_run_do_not_count_as_saved(train_config):
    config = train_config({"trainer.save_freq": 100})
    with checkpoint_store(config, "other").saving(1):
        pass
    state = RunState(config, loader(), None, 8, None, run_id="mine")
    state.step = 1
    with raises("checkpoint.last-save-failed", "global_step_1", "trainer.overwrite_output=true"):
        state.save_now([])
