"""Actor and embedded engine compute what transformers computes, or refuse the file, for random configurations.

By default some draws per family. Before a release more, with another seed::

    MODELS_SECONDS=60 MODELS_SEED=7 bash launch/test.sh tests/megatron/test_megatron_random_models.py
"""

from __future__ import annotations

import itertools
import json
import os
import time
from random import Random
from typing import NamedTuple

import pytest
import torch
import transformers
from arranged_layers import arranged_engine
from engine_cases import Setup, assemble, micro_batches
from family_cases import results_of, study
from random_models import FAMILIES, draw
from tiny_models import TEMPERATURE, Row, rows_of

from megarl.base.errors import ModelError
from megarl.base.ports import held_port
from megarl.megatron import OptimizerOptions, OutputOptions
from megarl.models import ParallelLayout, read_model_config
from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine

SECONDS = float(os.environ.get("MODELS_SECONDS", "0.5"))
"""Per family; a draw takes about half a second."""
SEED = os.environ.get("MODELS_SEED", "0")
FEWEST = 2
ROWS = [(3, 5), (20, 9), (9, 1)]
SETUP = Setup(ParallelLayout(), optimizer=OptimizerOptions(use_distributed_optimizer=False))
LOG_PROB_ERROR, GRADIENT_ERROR = 1e-4, 1e-3
"""Largest errors: of log-probs in nats, of gradients as a part of the largest one. Rounding reaches a tenth."""


class Examined(NamedTuple):
    """Draws that agree with transformers, that megarl refuses, and that transformers cannot compute; and errors."""

    equal: int
    refused: int
    impossible: int
    errors: list[str]


@pytest.mark.timeout(300 + 10 * SECONDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_equal_transformers(pool, tmp_path, family):
    (examined,) = pool.run(examine, 1, tmp_path, family, timeout=300 + 10 * SECONDS)
    print(family, examined)
    assert not examined.errors
    assert examined.equal > 0


def examine(place, folder, family):
    """Examine draws until the time is over."""
    end, counts, errors = time.monotonic() + SECONDS, {"equal": 0, "refused": 0, "impossible": 0}, []
    for number in itertools.count():
        if number >= FEWEST and counts["equal"] and time.monotonic() > end:
            break
        fields, path = draw(family, Random(f"{family} {SEED} {number}")), folder / f"{number}"
        theirs = saved(path, fields)
        if theirs is None:
            counts["impossible"] += 1
            continue
        try:
            read_model_config(path)
        except ModelError:
            counts["refused"] += 1
            continue
        found = differences(place, path, *theirs)
        counts["equal"] += not any(found.values())
        errors += [f"{family} {SEED} {number}: {found}\n{json.dumps(fields)}"] if any(found.values()) else []
    return Examined(**counts, errors=errors)


def saved(path, fields):
    """Save a model with random weights and this ``config.json``; None if transformers cannot compute it."""
    path.mkdir()
    file = path / "config.json"
    file.write_text(json.dumps(fields), encoding="utf-8")
    torch.manual_seed(5)
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name or "bias" in name:
                    tensor.add_(0.1 * torch.randn_like(tensor))
        model.save_pretrained(path)
        theirs = results_of(model, fields["model_type"].removesuffix("_text"), rows_of(ROWS))
    except Exception:  # of any kind: transformers checks little before it computes
        return None
    file.write_text(json.dumps(fields), encoding="utf-8")
    return model, theirs


def differences(place, path, model, theirs):
    """Errors beyond rounding, by what computed them; 0 for none."""
    with held_port() as port:  # each engine has a rendezvous of its own
        ours = study(place._replace(port=port), path, SETUP, rows_of(ROWS))
    assert ours is not None
    expected = torch.cat([log_probs for log_probs, _ in theirs.outputs])
    log_probs = {
        "actor": torch.cat([log_probs for log_probs, _ in ours.outputs]) - expected,
        "Transformer Engine's arrangement": arranged(place, path) - expected,
        "embedded engine": embedded(path, model),
    }
    errors = {name: error.abs().max().item() for name, error in log_probs.items()}
    grads, scale = assemble(path, SETUP, [ours.grads]), max(grad.abs().max() for grad in theirs.grads.values())
    gradient = max((grads[name] - grad).abs().max() / scale for name, grad in theirs.grads.items()).item()
    within = {name: 0.0 if error < LOG_PROB_ERROR else error for name, error in errors.items()}
    return {**within, "gradients": 0.0 if gradient < GRADIENT_ERROR else gradient}


def arranged(place, path):
    """Log-probs with Transformer Engine's arrangement of rotation and attention."""
    with held_port() as port, arranged_engine(place._replace(port=port), path, SETUP) as built:
        outputs = built.forward(micro_batches(rows_of(ROWS), SETUP), OutputOptions(temperature=TEMPERATURE))
        return torch.cat([output.log_probs for output in outputs or []])


def embedded(path, model):
    """Errors of the embedded engine's log-probs of the tokens that it samples."""
    engine = create_engine("embedded", str(path), EngineOptions())
    engine.load_hf(str(path))
    prompts = [row.prompt for row in rows_of(ROWS)]
    requests = [Request(f"{n}", ids.tolist(), SamplingParams(6, ignore_eos=True), n) for n, ids in enumerate(prompts)]
    errors = []
    for prompt, answer in zip(prompts, engine.generate(requests), strict=True):
        tokens = torch.tensor(answer.token_ids)
        row = Row(prompt, tokens, tokens, tokens)
        with torch.no_grad():
            errors.append(torch.tensor(answer.log_probs) - policy_log_probs(model, row))
    return torch.cat(errors)


def policy_log_probs(model, row):
    """Log-probs at temperature 1 of a row's response tokens, by transformers."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, row.response[:, None])[:, 0]
