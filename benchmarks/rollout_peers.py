"""Engines compared by ``benchmarks/rollout.py``: each generates forced lengths for given prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from megarl.rollout import EngineOptions, Request, RolloutEngine, SamplingParams, create_engine

Run = Callable[[], None]
Prompts = Sequence[list[int]]

HAS_SGLANG = importlib.util.find_spec("sglang") is not None


def generate_run(model: PreTrainedModel, prompts: Prompts, lengths: Sequence[int], batch_size: int) -> Run:
    """Run transformers' ``generate`` in static batches, in the order of the data, without log-probs."""

    def run_batch(chosen: Prompts, ends: torch.Tensor) -> None:
        width = max(map(len, chosen))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in chosen], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chosen], device=model.device)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=int(ends.max()),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_ForcedLengths(ends, width)]),
        )
        assert out.shape[1] == width + int(ends.max())

    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(prompts), batch_size):
            chosen = slice(start, start + batch_size)
            run_batch(prompts[chosen], torch.tensor(lengths[chosen], device=model.device))

    return run


@contextmanager
def continuous_run(
    folder: Path, prompts: Prompts, lengths: Sequence[int], slots: int, like: torch.Tensor
) -> Iterator[Run]:
    """transformers' continuous batching, which gives no log-probs either; its manager stays for all runs.

    Args:
        folder: the model; a separate copy is loaded, since its attention changes.
        prompts: token ids.
        lengths: tokens to generate.
        slots: sequences at a time.
        like: has the device and the dtype.
    """
    from transformers import ContinuousBatchingConfig

    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=like.dtype, trust_remote_code=False).eval().to(like.device)
    )
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0)
    sampling.max_new_tokens = max(lengths)
    # Room for all sequences in pages of 32 tokens, so that memory is no limit.
    blocks = sum(-(-(len(prompt) + length) // 32) for prompt, length in zip(prompts, lengths, strict=True))
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=blocks, max_batch_tokens=max(512, slots), max_requests_per_batch=slots
    )
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=config, block=True, timeout=30
    ) as manager:

        def run() -> None:
            for prompt, length in zip(prompts, lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            results = [manager.get_result(timeout=600) for _ in prompts]
            assert sum(len(result.generated_tokens) for result in results) == sum(lengths)

        yield run


def engine_run(engine: RolloutEngine, prompts: Prompts, lengths: Sequence[int]) -> Run:
    """Run an engine of megarl, with log-probs."""
    requests = [
        Request(str(number), prompt, SamplingParams(length, ignore_eos=True), number)
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def run() -> None:
        completions = engine.generate(requests)
        assert [len(completion.token_ids) for completion in completions] == list(lengths)

    return run


def sglang_run(engine: RolloutEngine, prompts: Prompts, lengths: Sequence[int]) -> Run:
    """Run the SGLang inside a megarl engine by its ``Engine.generate``, with log-probs."""
    backend = engine._backend  # type: ignore[attr-defined]
    sampling = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]

    async def everything() -> list[dict[str, object]]:
        answers: list[dict[str, object]] = await backend._engine.async_generate(
            input_ids=list(prompts), sampling_params=sampling, return_logprob=True
        )
        return answers

    def run() -> None:
        answers = engine._loop.start(everything()).result()  # type: ignore[attr-defined]
        assert [len(answer["output_ids"]) for answer in answers] == list(lengths)

    return run


def embedded_engine(folder: Path, slots: int, device: str, dtype: str) -> RolloutEngine:
    """Build megarl's embedded engine with a folder's weights."""
    options = EngineOptions(max_num_seqs=slots, device=device, dtype=dtype)
    engine = create_engine("embedded", str(folder), options)
    engine.load_hf(str(folder))
    return engine


def sglang_engine(folder: Path, slots: int, device: str, dtype: str) -> RolloutEngine:
    """Build SGLang in this process, behind megarl's engine contract."""
    from megarl.rollout.sglang.options import SGLangOptions

    options = SGLangOptions(max_num_seqs=slots, device=device, dtype=dtype)
    engine = create_engine("sglang", str(folder), options)
    engine.load_hf(str(folder))
    return engine


class _ForcedLengths(StoppingCriteria):
    """Ends each row of a batch after its number of tokens."""

    def __init__(self, lengths: torch.Tensor, prompt_width: int) -> None:
        self.lengths, self.prompt_width = lengths, prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Which rows are done."""
        return self.lengths <= input_ids.shape[1] - self.prompt_width
