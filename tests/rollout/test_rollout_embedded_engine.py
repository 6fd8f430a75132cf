"""Embedded engine beyond the contract: saved work, reused memory, dtypes, and failures."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.expected_errors import raises
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megarl.base.errors import ConfigError, WeightSyncError
from megarl.models import LocalParam, read_model_config
from megarl.rollout import EngineOptions, Request, RolloutError, SamplingParams, create_engine
from megarl.rollout.embedded import EmbeddedEngine, kv_cache
from megarl.rollout.embedded.decoder import TransformerDecoder
from megarl.rollout.embedded.engine import PROMPT_TOKENS, WeightStore
from megarl.rollout.sglang.options import SGLangOptions


def loaded(folder, options=None, **settings):
    engine = EmbeddedEngine(read_model_config(folder), options, **settings)
    engine.load_hf(str(folder))
    return engine


def requests_of(prompts, **params):
    params = {"max_new_tokens": 5, "ignore_eos": True, **params}
    return [Request(f"r{i}", prompt, SamplingParams(**params), i) for i, prompt in enumerate(prompts)]


@pytest.fixture
def computed(monkeypatch):
    """Tokens of each forward pass."""
    sizes = []
    forward = TransformerDecoder.hidden

    def counting(self, tokens, *args, **kwargs):
        sizes.append(len(tokens))
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(TransformerDecoder, "hidden", counting)
    return sizes


class TestComputedTokens:
    def test_a_prompt_is_computed_once_for_its_samples_and_without_padding(self, make_folder, computed):
        prompts = [[1, 2, 3]] * 4 + [[4] * 10] * 4
        loaded(make_folder()).generate(requests_of(prompts, max_new_tokens=3))
        assert computed == [13, 8, 8]

    def test_the_shared_prefix_is_computed_once(self, make_folder, computed):
        prompts = [[*range(20), *[20 + i] * (1 + i)] for i in range(5)]
        loaded(make_folder()).generate(requests_of(prompts, max_new_tokens=1))
        assert computed == [20, 1 + 2 + 3 + 4 + 5]

    def test_ended_sequences_are_not_computed(self, make_folder, computed):
        requests = [Request(f"r{n}", [n], SamplingParams(n, ignore_eos=True), 0) for n in (1, 5, 2, 4)]
        loaded(make_folder()).generate(requests)
        assert computed == [4, 3, 2, 2, 1]

    def test_slots_are_refilled_while_others_run(self, make_folder, computed):
        limits = [6, 1, 1, 1, 1]
        requests = [Request(f"r{i}", [i], SamplingParams(n, ignore_eos=True), 0) for i, n in enumerate(limits)]
        loaded(make_folder(), EngineOptions(max_num_seqs=2)).generate(requests)
        # Prompts of two, then the long one's steps between the prompts of those that take the other slot.
        assert computed == [2, 1, 1, 1, 1, 1, 1, 1, 1]

    def test_prompt_passes_are_bounded(self, make_folder, computed, monkeypatch):
        monkeypatch.setitem(PROMPT_TOKENS, "cpu", 8)
        engine = loaded(make_folder())
        engine.generate(requests_of([[i] * n for i, n in enumerate([5, 3, 9, 2, 2])], max_new_tokens=1))
        assert computed == [8, 9, 4]


def test_prompt_passes_of_any_size_give_equal_tokens(make_folder, monkeypatch):
    requests = requests_of([[i] * (i + 1) for i in range(9)] * 2)
    large = loaded(make_folder())
    monkeypatch.setitem(PROMPT_TOKENS, "cpu", 4)
    small = loaded(make_folder())
    assert [c.token_ids for c in small.generate(requests)] == [c.token_ids for c in large.generate(requests)]


@pytest.mark.parametrize("family", ["qwen2", "olmo3", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_decoding_in_parts_of_similar_lengths(make_folder, reference_for, monkeypatch, family):
    """Long sequences start after short ones and end before them, so that slots change places."""
    folder, parts = make_folder(family), []
    divide = kv_cache.decode_parts
    monkeypatch.setattr(kv_cache, "NARROW", 16)
    monkeypatch.setattr(kv_cache, "decode_parts", lambda *args: parts.append(divide(*args)) or parts[-1])
    sizes = [(3, 9), (5, 40), (80, 4), (2, 2), (60, 12), (4, 30), (90, 7), (3, 25), (20, 20), (70, 5), (2, 40)]
    requests = [
        Request(f"r{i}", [(i + j) % 50 for j in range(prompt)], SamplingParams(count, ignore_eos=True), i)
        for i, (prompt, count) in enumerate(sizes)
    ]
    completions = loaded(folder, EngineOptions(max_num_seqs=5)).generate(requests)
    assert max(map(len, parts)) == 3 and min(map(len, parts)) == 1
    assert all([width for _, width in one] == sorted((w for _, w in one), reverse=True) for one in parts)
    for request, completion in zip(requests, completions, strict=True):
        expected = reference_for(folder).log_probs(request.prompt_ids, completion.token_ids)
        assert len(completion.token_ids) == request.params.max_new_tokens
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)


def test_later_calls_are_independent_of_earlier_ones(make_folder):
    engine = loaded(make_folder())
    short = requests_of([[1, 2], [3]])
    before = loaded(make_folder()).generate(short)
    engine.generate(requests_of([[9] * 60] * 40, max_new_tokens=60))
    assert engine.generate(short) == before


def test_weights_changed_between_calls_are_used_at_once(make_folder):
    engine = loaded(make_folder(seed=0))
    requests = requests_of([[1, 2], [3]])
    engine.generate(requests)
    engine.load_hf(str(make_folder(seed=1)), version=1)
    assert engine.generate(requests)[0].token_ids == loaded(make_folder(seed=1)).generate(requests)[0].token_ids


def test_non_finite_log_probs_are_reported_and_the_cache_is_dropped(make_folder):
    folder = make_folder()
    engine = loaded(folder)
    requests = requests_of([[1, 2], [3]])
    before = engine.generate(requests)
    weights = engine._weights
    weights.begin(4)
    weights.write((name, (0,) * t.dim(), torch.full_like(t, torch.nan)) for name, t in weights.tensors.items())
    weights.end(4)
    with raises("rollout.logprobs-not-finite", "weight version 4", "in request 'r", "2 running requests"):
        engine.generate(requests)
    engine.load_hf(str(folder))
    assert engine.generate(requests) == before


def test_an_engine_serves_again_after_an_exception_in_a_step(make_folder):
    """The step fails after some slots and lanes were assigned."""

    def decode(ids):
        if ids:
            raise OSError("the tokenizer's file is gone")
        return ""

    engine = loaded(make_folder(), EngineOptions(max_num_seqs=3), decode=decode)
    requests = requests_of([[1, 2], [3], [4, 5]], max_new_tokens=30)
    before = engine.generate(requests)
    engine.submit([*requests, Request("bad", [6], SamplingParams(9, stop=("x",)), 0)])
    with raises("engine.step-failed", "OSError: the tokenizer's file is gone", "running requests", error=RolloutError):
        for _ in range(4):
            engine.poll(60.0)
    assert engine.poll(0.0) == []
    assert engine.generate(requests) == before


def test_a_cache_that_cannot_grow_stays_as_it_is(make_folder, monkeypatch):
    engine = loaded(make_folder(max_position_embeddings=4096))
    running, longer = requests_of([[1, 2]], max_new_tokens=40), [Request("long", [3], SamplingParams(3000), 0)]
    before = engine.generate(running)
    engine.submit(running)
    pads = []

    def pad(cache, amount):
        pads.append(amount)
        if len(pads) == 3:  # the caches of some layers have grown
            raise torch.OutOfMemoryError
        return torch.nn.functional.pad(cache, amount)

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "F", SimpleNamespace(pad=pad))
        with pytest.raises(torch.OutOfMemoryError):
            engine.submit(longer)
    assert engine.poll(60.0) == before
    assert len(engine.generate([replace(longer[0], params=SamplingParams(3000, ignore_eos=True))])[0].token_ids) == 3000


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "qwen3_5_text"])
def test_bfloat16(make_folder, reference_for, family):
    folder = make_folder(family)
    engine = loaded(folder, EngineOptions(dtype="bfloat16"))
    for request, done in zip(requests := requests_of([[1, 2, 3], [4] * 9]), engine.generate(requests), strict=True):
        expected = reference_for(folder).log_probs(request.prompt_ids, done.token_ids)
        assert torch.tensor(done.log_probs).double() == pytest.approx(expected, abs=0.15)


class TestEndOfSequence:
    def folder_with(self, make_folder, tmp_path, eos):
        shutil.copytree(make_folder(), tmp_path / "model")
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
        return str(tmp_path / "model")

    def first_token(self, engine, folder):
        engine.load_hf(folder)
        return engine.generate([Request("r", [1], SamplingParams(4, 0.0), 0)])[0]

    def test_the_token_of_the_config_ends_it_beside_those_of_the_generation_config(
        self, make_folder, tmp_path, reference_for
    ):
        greedy = reference_for(make_folder()).greedy([1], 4)
        folder = self.folder_with(make_folder, tmp_path, [49])
        config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8")) | {
            "eos_token_id": greedy[0]
        }
        (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert self.first_token(create_engine("embedded", folder), folder).token_ids == greedy[:1]

    def test_the_token_of_the_tokenizer_ends_it_in_both_engines(self, make_folder, tmp_path, reference_for):
        greedy = reference_for(make_folder()).greedy([1], 4)
        folder = self.folder_with(make_folder, tmp_path, [49])
        core = Tokenizer(models.WordLevel({f"word{n}": n for n in range(50)}, unk_token="word0"))
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"word{greedy[0]}").save_pretrained(folder)
        assert self.first_token(create_engine("embedded", folder), folder).token_ids == greedy[:1]
        assert SGLangOptions().end_tokens(folder) == EngineOptions().end_tokens(folder)
        assert set(EngineOptions().end_tokens(folder)) == {greedy[0], 49, read_model_config(folder).raw["eos_token_id"]}

    def test_the_generation_config_may_name_several(self, make_folder, tmp_path, reference_for):
        greedy = reference_for(make_folder()).greedy([1], 4)
        folder = self.folder_with(make_folder, tmp_path, [49, greedy[0]])
        assert self.first_token(create_engine("embedded", folder), folder).token_ids == greedy[:1]

    def test_options_override_both(self, make_folder, tmp_path, reference_for):
        greedy = reference_for(make_folder()).greedy([1], 4)
        folder = self.folder_with(make_folder, tmp_path, greedy[0])
        unused = next(t for t in range(50) if t not in greedy)
        engine = create_engine("embedded", folder, EngineOptions(eos_token_ids=(unused,)))
        assert self.first_token(engine, folder).token_ids == greedy

    def test_eos_outside_the_vocabulary_is_refused(self, make_folder):
        with raises("rollout.token-id-range", "eos_token_ids: 50"):
            create_engine("embedded", str(make_folder()), EngineOptions(eos_token_ids=(50,)))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tensor_parallel_size": 2}, "engine.one-device"),
        ({"dtype": "float8"}, "engine.option-choice"),
        ({"max_num_seqs": 0}, "engine.option-range"),
    ],
)
def test_unsupported_options_are_refused(make_folder, options, code):
    ((name, value),) = options.items()
    with raises(code, f"{name}={value!r}", error=ConfigError):
        create_engine("embedded", str(make_folder()), EngineOptions(**options))


def test_sleep_returns_cached_memory_to_the_gpu(make_folder, monkeypatch):
    """Torch keeps freed blocks, which the trainer on the same GPU could not use."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(engine.weight_version))
    engine = loaded(make_folder())
    engine.sleep()
    assert calls == []
    engine.wake()
    engine.options = replace(engine.options, device="cuda")
    engine.sleep()
    assert calls == [-1], "after the weights are gone"


def test_prompt_passes_of_a_gpu_are_larger(make_folder):
    """A pass of 1024 tokens is bound by its launches."""
    config = read_model_config(make_folder())
    assert EmbeddedEngine(config)._prompt_tokens == 1024
    assert PROMPT_TOKENS["cuda"] == 16384


def test_steps_wait_for_the_device_once(make_folder, monkeypatch):
    """Reading a number of the device waits for it: only the ended sequences are read, in each step."""
    engine = loaded(make_folder())
    reads = []
    for name in ("item", "__int__", "tolist", "nonzero", "__bool__", "__index__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _f=original, _n=name, **k: (reads.append(_n), _f(self, *a, **k))[1]
        )
    engine.submit([Request("r", [1], SamplingParams(40, ignore_eos=True), 0)])
    with torch.inference_mode():
        engine._batcher.advance()
        reads.clear()
        for _ in range(5):
            engine._batcher.advance()
    assert reads == ["nonzero"] * 5


def test_a_refused_slice_writes_nothing_and_other_dtypes_are_converted():
    store = WeightStore([LocalParam("p", (4,), ())], torch.float32, torch.device("cpu"))
    store.allocate()
    store.begin(0)
    store.write([("p", (0,), torch.ones(2, dtype=torch.bfloat16))])
    with pytest.raises(WeightSyncError):
        store.write([("p", (1,), torch.full((3,), 5.0))])
    assert store.tensors["p"].tolist() == [1, 1, 0, 0]
    assert store.tensors["p"].dtype == torch.float32


def test_updates_are_in_place():
    store = WeightStore([LocalParam("p", (4,), ())], torch.float32, torch.device("cpu"))
    store.allocate()
    address = store.tensors["p"].data_ptr()
    store.begin(1)
    store.write([("p", (0,), torch.ones(4))])
    store.end(1)
    assert store.tensors["p"].data_ptr() == address
