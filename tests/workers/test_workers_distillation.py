"""On-policy distillation equals a plain loop over transformers in any layout: the teacher's columns and each loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from role_processes import (
    LAYOUTS,
    MINI_BATCH_ROWS,
    Role,
    actor_arguments,
    log_prob_settings,
    role_settings,
    with_offload,
)
from safetensors.torch import load_file
from support.release import of_release
from tiny_policies import (
    TEMPERATURE,
    VOCAB,
    Row,
    Token,
    actor_tokens,
    load_model,
    policy_tokens,
    rows_of,
    save_model,
    train,
)

from megarl.algorithms.kl import forward_kl_topk
from megarl.cluster.calls import completed_call
from megarl.config import ActorConfig
from megarl.config.schema.distillation import DistillationLossConfig
from megarl.megatron import PackedMicroBatch, PolicyOutputs
from megarl.trainer.phases.model_passes import TeacherPhase
from megarl.workers.actor import ActorWorker, loss_options
from megarl.workers.distillation import distillation_loss
from megarl.workers.frozen import TeacherWorker, hidden_columns
from megarl.workers.settings import HiddenForm, TeacherHead

TOPK, COEF, MIN, MAX = 5, 0.5, -4.0, 2.0
LOSSES = {
    "topk": DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=TOPK, use_task_rewards=False, log_prob_min_clamp=MIN, loss_max_clamp=MAX
    ),
    "k3 beside rewards": DistillationLossConfig(loss_mode="k3", distillation_loss_coef=COEF),
    "k1 as advantage": DistillationLossConfig(
        loss_mode="k1",
        use_policy_gradient=True,
        use_task_rewards=False,
        loss_max_clamp=MAX,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
    ),
}


def distribution(model, row):
    """Log-probs of the whole vocabulary at each response token."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def teacher_distribution(teacher, row):
    """Log-probs of the teacher over the student's vocabulary, which is smaller."""
    with torch.no_grad():
        return distribution(teacher, row)[:, :VOCAB].log_softmax(-1)


def at_response(log_probs, row):
    return log_probs.gather(1, row.response[:, None])[:, 0]


def topk_tokens(teacher, model, row):
    theirs, ours, tokens = teacher_distribution(teacher, row), distribution(model, row), []
    for log_q, log_p in zip(theirs, ours, strict=True):
        best = log_q.argsort(descending=True)[:TOPK]
        masses = {name: x[best].exp().sum().item() for name, x in (("student", log_p), ("teacher", log_q))}
        kl = torch.zeros(())
        for token in best.tolist():
            q = max(log_q[token].item(), MIN)
            p = log_p[token] if log_p[token].item() > MIN else torch.tensor(MIN)
            kl = kl + torch.tensor(q).exp() * (q - p)
        loss = kl if 0 < kl.item() < MAX else torch.tensor(min(max(kl.item(), 0.0), MAX))
        tokens.append((loss, {"distillation/loss": loss}, {f"distillation/{n}_mass": m for n, m in masses.items()}))
    return tokens


def k3_tokens(teacher, model, row):
    theirs = at_response(teacher_distribution(teacher, row), row)
    ours, tokens = policy_tokens(model, row)[0], []
    for (task, losses, means), log_q, log_p in zip(actor_tokens(model, row), theirs, ours, strict=True):
        kl = (log_q - log_p).exp() - (log_q - log_p) - 1
        means = {**means, "distillation/abs_loss": kl.item()}
        tokens.append((task + COEF * kl, {**losses, "distillation/loss": kl}, means))
    return tokens


def k1_tokens(teacher, model, row):
    theirs = at_response(teacher_distribution(teacher, row), row)
    ours, tokens = policy_tokens(model, row)[0], []
    for index, (log_q, log_p) in enumerate(zip(theirs, ours, strict=True)):
        distance = log_p.item() - log_q.item()
        advantage = -min(max(distance, -MAX), MAX)
        old = row.columns["old_log_probs"][index].item()
        ratio = (log_p - old).exp()
        near = min(max(ratio.item(), 0.9), 1.3)
        clipped = -advantage * near > -advantage * ratio.item()
        loss = torch.tensor(-advantage * near) if clipped else -advantage * ratio
        dual = advantage < 0 and ratio.item() > 1.5
        loss = torch.tensor(-advantage * 1.5) if dual else loss
        means = {"abs_loss": abs(distance), "ppo_kl": old - log_p.item()}
        means |= {"pg_clipfrac": float(clipped), "pg_clipfrac_lower": float(dual)}
        means = {f"distillation/{name}": value for name, value in means.items()}
        tokens.append((loss, {"distillation/loss": loss}, means))
    return tokens


FORMULAS: dict[str, Callable[[Any, Any, Row], list[Token]]] = {
    "topk": topk_tokens,
    "k3 beside rewards": k3_tokens,
    "k1 as advantage": k1_tokens,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A larger model with more, unused tokens, as members of a family have."""
    path = tmp_path_factory.mktemp("teacher")
    shape = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": VOCAB + 6}
    return path, save_model(path, **shape)


@pytest.fixture(scope="module")
def expected(models, teacher):
    def trained(case):
        model = load_model(models.policy_path)
        return train(model, models.batch, lambda m, row: case(teacher[1], m, row), "token-mean", MINI_BATCH_ROWS)

    return {name: trained(case) for name, case in FORMULAS.items()}


def graded(pool, path, layout, batch):
    """The batch with all columns of a teacher in a layout."""
    arguments = {
        "settings": role_settings(path, layout, learns=False),
        "log_prob": log_prob_settings(),
        "topk": 0,
        "candidates": VOCAB,
    }
    with Role(pool, TeacherWorker, layout, arguments) as worker:
        batch = batch.union(worker.map("compute_teacher_log_prob", batch))
        worker.rebuild(topk=TOPK)
        return batch.union(worker.map("compute_teacher_log_prob", batch))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_teacher_and_losses(
    role_pool,
    models,
    teacher,
    expected,
    tmp_path,
    layout,
):
    shape = LAYOUTS[layout]
    batch = graded(role_pool, teacher[0], shape, models.batch)
    for row in rows_of(batch):
        log_q = teacher_distribution(teacher[1], row)
        torch.testing.assert_close(row.columns["teacher_log_prob"], at_response(log_q, row), rtol=0, atol=1e-5)
        best = log_q.topk(TOPK)
        assert (row.columns["teacher_topk_ids"] == best.indices).all()
        torch.testing.assert_close(row.columns["teacher_topk_log_probs"], best.values, rtol=0, atol=1e-5)
    with Role(role_pool, ActorWorker, shape, actor_arguments(models.policy_path, shape)) as actor:
        for name, loss in LOSSES.items():
            actor.rebuild(distillation=loss, config=actor_arguments(models.policy_path, shape)["config"])
            metrics = actor.update("update_actor", batch)
            folder = tmp_path / name.replace(" ", "_")
            actor.call("export_hf", str(folder))
            ours = {f"actor/{key}": value for key, value in expected[name].metrics.items()}
            extra = {"actor/skipped_steps": 0.0, "actor/empty_steps": 0.0, "actor/kl_coef": 0.2}
            assert metrics == pytest.approx(ours | extra, rel=1e-5, abs=1e-6), name
            (file,) = folder.glob("*.safetensors")
            weights = load_file(file)
            for key, theirs in expected[name].weights.items():
                torch.testing.assert_close(weights[key], theirs, rtol=1e-5, atol=1e-6)


def full_tokens(teacher, model, row):
    """The policy loss, and the KL from student to teacher over the student's vocabulary."""
    log_q = teacher_distribution(teacher, row)
    log_p, tokens = distribution(model, row), []
    for (task, losses, means), p, q in zip(actor_tokens(model, row), log_p, log_q, strict=True):
        kl = (p.exp() * (p - q)).sum()
        tokens.append((task + COEF * kl, {**losses, "distillation/loss": kl}, means))
    return tokens


EXACT = DistillationLossConfig(loss_mode="full", distillation_loss_coef=COEF)


@pytest.mark.parametrize(
    ("of_teacher", "of_actor", "tied"),
    of_release(
        [("tp2", "pp2", True), ("cp2", "tp2", True), ("pp2", "cp2", False)],
        [("tp1", "tp2", False), ("pp2", "dp2", False)],
    ),
)
def test_exact_kl_to_a_teacher_of_another_shape_and_layout(role_pool, models, tmp_path, of_teacher, of_actor, tied):
    """Final hidden states travel, the actor has its rows of the output layer; the loss has the whole vocabulary."""
    shape = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": VOCAB + 30}
    teacher = save_model(tmp_path / "teacher", tie_word_embeddings=tied, **shape)
    model = load_model(models.policy_path)
    expected = train(model, models.batch, lambda m, row: full_tokens(teacher, m, row), "token-mean", MINI_BATCH_ROWS)
    arguments = {
        "settings": role_settings(tmp_path / "teacher", LAYOUTS[of_teacher], learns=False),
        "log_prob": log_prob_settings(),
        "topk": 0,
        "candidates": VOCAB,
        "hidden": HiddenForm(48, "float32"),
    }
    with Role(role_pool, TeacherWorker, LAYOUTS[of_teacher], arguments) as worker:
        states = worker.map("compute_teacher_log_prob", models.batch)
    assert states.tensors["teacher_hidden"].shape[-1] == 48 and "teacher_number" not in states.tensors
    arguments = actor_arguments(models.policy_path, LAYOUTS[of_actor])
    arguments |= {"distillation": EXACT, "teacher_heads": [TeacherHead(str(tmp_path / "teacher"), "float32")]}
    with Role(role_pool, ActorWorker, LAYOUTS[of_actor], arguments) as actor:
        metrics = actor.update("update_actor", models.batch.union(states))
        actor.call("export_hf", str(tmp_path / "hf"))
    ours = {f"actor/{key}": value for key, value in expected.metrics.items()}
    assert ours["actor/distillation/loss"] > 1
    assert metrics == pytest.approx(
        ours | {"actor/skipped_steps": 0.0, "actor/empty_steps": 0.0, "actor/kl_coef": 0.2}, rel=1e-5, abs=1e-6
    )
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(file)
    for key, theirs in expected.weights.items():
        torch.testing.assert_close(weights[key], theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=key: f"{n}: {m}")


class RunningTeacher:
    """A teacher's worker group for the phase: processes that live during its pass."""

    def __init__(self, pool, path, layout, form):
        self.pool, self.layout = pool, layout
        settings = role_settings(path, layout, learns=False)
        self.arguments = {"settings": settings, "log_prob": log_prob_settings(), "topk": 0, "candidates": VOCAB}
        self.arguments["hidden"] = form

    def submit(self, verb, batch):
        with Role(self.pool, TeacherWorker, self.layout, self.arguments) as worker:
            return completed_call(worker.map(verb, batch))


@pytest.mark.parametrize(
    ("of_teachers", "of_actor"), [(("tp2", "pp2"), "tp2"), (("tp1", "cp2"), "cp2"), (("dp2", "tp1"), "pp2")]
)
def test_exact_kl_of_each_row_to_its_own_teacher(role_pool, models, tmp_path, of_teachers, of_actor):
    """Two teachers of other hidden sizes and layouts; each mini-batch and micro-batch has rows of both."""
    shapes = {"wide": (48, 6, VOCAB + 30), "narrow": (24, 4, VOCAB)}
    teachers = {
        name: save_model(tmp_path / name, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
        for name, (hidden, heads, vocab) in shapes.items()
    }
    sources = ["wide", "narrow", "narrow", "wide", "narrow", "narrow", "wide", "wide"]
    batch = models.batch.with_columns({}, {"data_source": np.array(sources, dtype=object)})
    of_response = {tuple(row.response.tolist()): s for row, s in zip(rows_of(batch), sources, strict=True)}
    assert len(of_response) == len(sources)
    model = load_model(models.policy_path)
    expected = train(
        model,
        models.batch,
        lambda m, row: full_tokens(teachers[of_response[tuple(row.response.tolist())]], m, row),
        "token-mean",
        MINI_BATCH_ROWS,
    )
    running = {
        name: RunningTeacher(role_pool, tmp_path / name, LAYOUTS[layout], HiddenForm(48, "float32", number))
        for number, (name, layout) in enumerate(zip(shapes, of_teachers, strict=True))
    }
    metrics: dict[str, float] = {}
    states = TeacherPhase(running, "data_source").submit(batch, metrics).result()
    assert metrics == {"distillation/rows/wide": 4.0, "distillation/rows/narrow": 4.0}
    arguments = actor_arguments(models.policy_path, LAYOUTS[of_actor])
    arguments |= {"distillation": EXACT, "teacher_heads": [TeacherHead(str(tmp_path / n), "float32") for n in shapes]}
    arguments = with_offload(arguments) if of_actor == "tp2" else arguments
    with Role(role_pool, ActorWorker, LAYOUTS[of_actor], arguments) as actor:
        metrics = actor.update("update_actor", batch.union(states))
        actor.call("export_hf", str(tmp_path / "hf"))
    metrics = {name: value for name, value in metrics.items() if name.startswith("actor/")}
    ours = {f"actor/{key}": value for key, value in expected.metrics.items()}
    assert metrics == pytest.approx(
        ours | {"actor/skipped_steps": 0.0, "actor/empty_steps": 0.0, "actor/kl_coef": 0.2}, rel=1e-5, abs=1e-6
    )
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(file)
    for key, theirs in expected.weights.items():
        torch.testing.assert_close(weights[key], theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=key: f"{n}: {m}")


def test_hidden_states_of_all_teachers_fit_into_one_column():
    states = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    columns = hidden_columns(states, HiddenForm(4, "float32", 1))
    assert torch.equal(columns["teacher_hidden"], torch.cat([states.float(), torch.zeros(5, 1)], 1))
    assert columns["teacher_number"].tolist() == [1] * 5
    alone = hidden_columns(states, HiddenForm(3, "bfloat16"))
    assert list(alone) == ["teacher_hidden"] and alone["teacher_hidden"] is states


def test_hidden_states_keep_the_teachers_number_format(role_pool, models, tmp_path):
    save_model(tmp_path)
    settings = role_settings(tmp_path, LAYOUTS["tp1"], learns=False)
    settings = replace(settings, megatron=replace(settings.megatron, dtype="bfloat16"))
    arguments = {"settings": settings, "log_prob": log_prob_settings(), "topk": 0, "candidates": VOCAB}
    with Role(role_pool, TeacherWorker, LAYOUTS["tp1"], arguments | {"hidden": HiddenForm(32, "bfloat16")}) as worker:
        states = worker.map("compute_teacher_log_prob", models.batch)
    assert states.tensors["teacher_hidden"].dtype == torch.bfloat16


@pytest.mark.parametrize(("clamp", "expected"), [(None, [math.exp(5) - 6, 14 + math.exp(-15)]), (3.0, [3.0, 3.0])])
def test_k3_has_no_other_clamp_than_the_configured_one(clamp, expected):
    """A token that only the teacher finds probable, and one that it finds improbable, still have a gradient."""
    student = torch.tensor([-6.0, -1.0], requires_grad=True)
    row = (torch.tensor([1]), torch.tensor([2, 3]))
    batch = PackedMicroBatch.from_rows([row], {"teacher_log_prob": torch.tensor([-1.0, -16.0])})
    outputs = PolicyOutputs(student, None, torch.tensor([True, True]))
    config = DistillationLossConfig(loss_mode="k3", loss_max_clamp=clamp)
    loss = distillation_loss(config, loss_options(ActorConfig()), outputs, batch).loss
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(expected)
    slopes = [1 - math.exp(5), 1 - math.exp(-15)] if clamp is None else [0.0, 0.0]
    assert student.grad.tolist() == pytest.approx(slopes)


def test_topk_over_the_whole_vocabulary_is_the_exact_kl():
    generator = torch.Generator().manual_seed(1)
    log_p, log_q = (torch.randn(6, 9, generator=generator).log_softmax(-1) for _ in range(2))
    compared = forward_kl_topk(log_p, log_q)
    exact = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (log_q, log_p)))
    torch.testing.assert_close(compared.kl, exact)
    torch.testing.assert_close(compared.student_mass, torch.ones(6))
