"""The embedded engine of every family in both number formats: prompts, steps, sampling, sleep and wake."""

import pytest
import torch

from megarl.models import parse_model_config
from megarl.ops.acceptance.models import FAMILIES
from megarl.rollout import EngineOptions, Request, SamplingParams
from megarl.rollout.embedded import EmbeddedEngine
from tests.cuda_host.test_cuda_host_engine import DTYPES, fields

TOKENS = 6


PARAMS = (
    SamplingParams(TOKENS, temperature=0.0, ignore_eos=True),
    SamplingParams(TOKENS, temperature=1.0, ignore_eos=True),
    SamplingParams(TOKENS, temperature=0.7, top_k=5, top_p=0.9, ignore_eos=True),
    SamplingParams(TOKENS, temperature=1.0, ignore_eos=True, repetition_penalty=1.2),
)


def generate(engine):
    """Run the steps of prompts of different lengths, two with a common beginning; no kernel marks one as finished."""
    prompts = [[1, 2, 3], list(range(40)), [*range(300), 1], [*range(300), 2]]
    pairs = zip(prompts, PARAMS, strict=True)
    engine.submit([Request(str(n), prompt, params, n) for n, (prompt, params) in enumerate(pairs)])
    with torch.inference_mode():
        for _ in range(TOKENS):
            assert engine._batcher is not None and not engine._batcher.advance()
    engine.abort(["0"])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
def test_embedded_engine(family, dtype, chosen_attention):
    options = EngineOptions(str(dtype).removeprefix("torch."), "cuda", max_num_seqs=4, max_model_len=512)
    engine = EmbeddedEngine(parse_model_config(fields(family)), options)
    engine._weights.version = 0  # the weights are zeros, as new memory is
    engine.sleep(("kv_cache", "weights"))
    engine.wake(("weights", "kv_cache"))
    engine._weights.version = 0
    generate(engine)
    assert chosen_attention <= {"FLASH_ATTENTION", "EFFICIENT_ATTENTION"}
