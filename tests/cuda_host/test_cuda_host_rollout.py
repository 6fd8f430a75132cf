"""The embedded engine of every family in both number formats: prompts, captured steps, sampling, sleep and wake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_host_engine import DTYPES, fields

from megarl.models import parse_model_config
from megarl.ops.acceptance.models import FAMILIES
from megarl.rollout import EngineOptions, Request, SamplingParams
from megarl.rollout.embedded import EmbeddedEngine

TOKENS = 6


def requests(**params: Any) -> list[Request]:
    """Prompts of different lengths, the last two with a common beginning."""
    prompts = [[1, 2, 3], list(range(40)), [*range(300), 1], [*range(300), 2]]
    sampling = SamplingParams(TOKENS, ignore_eos=True, **params)
    return [Request(str(number), prompt, sampling, number) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
def test_embedded_engine(
    family: str, dtype: torch.dtype, chosen_attention: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineOptions(str(dtype).removeprefix("torch."), "cuda", max_num_seqs=4, max_model_len=512)
    engine = EmbeddedEngine(parse_model_config(fields(family)), options)
    engine._weights.version = 0  # the weights are zeros, as new memory is
    for params in ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}):
        completions = engine.generate(requests(**params))
        assert [len(completion.token_ids) for completion in completions] == [TOKENS] * 4
        assert all(len(completion.log_probs) == TOKENS for completion in completions)
    engine.sleep(("kv_cache", "weights"))
    engine.wake(("weights", "kv_cache"))
    engine.shutdown()
    assert [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()] == []
    assert chosen_attention <= {"FLASH_ATTENTION", "EFFICIENT_ATTENTION"}


def test_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    options = EngineOptions("bfloat16", "cuda", max_num_seqs=4, max_model_len=512)
    engine = EmbeddedEngine(parse_model_config(fields("qwen3")), options)
    engine._weights.version = 0
    engine.generate(requests(temperature=1.0))
    assert replays
