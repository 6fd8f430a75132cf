"""Decode steps by captured launches: a capture records a function here, and its replay runs the function again."""

import pytest
import torch

from megarl.models import read_model_config
from megarl.rollout import EngineOptions, Request, SamplingParams
from megarl.rollout.embedded import EmbeddedEngine, decode_step, generation
from megarl.rollout.embedded.decode_step import GraphedDecodeStep


class Captures:
    """Captures on a CPU."""

    def __init__(self):
        self.steps, self.count, self.replays, self.fails = [], 0, 0, False

    def step(self, cache, state, *, dynamic):
        assert not dynamic
        self.steps.append(GraphedDecodeStep(cache, state, self.capture))
        return self.steps[-1]

    def capture(self, function):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.count += 1

        def replay():
            self.replays += 1
            function()

        return replay


@pytest.fixture
def captures(monkeypatch):
    captures = Captures()
    monkeypatch.setattr(generation, "decode_step", captures.step)
    return captures


def loaded(folder, **options):
    engine = EmbeddedEngine(read_model_config(folder), EngineOptions(**options))
    engine.load_hf(str(folder))
    return engine


def mixed_requests(count=11):
    """Different prompts and lengths, so that sequences end, slots close and others are refilled."""
    return [
        Request(f"r{i}", [1 + i % 3] * (1 + 5 * (i % 4)), SamplingParams(3 + 9 * (i % 5), ignore_eos=True), i)
        for i in range(count)
    ]


def assert_equal(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert result.token_ids == other.token_ids
        assert result.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.parametrize(("family", "slots"), [*(("qwen2", slots) for slots in (1, 3, 5, 256)), ("qwen3_5_text", 5)])
def test_replayed_steps_equal_eager_ones(make_folder, monkeypatch, captures, family, slots):
    requests, folder = mixed_requests(), make_folder(family)
    results = loaded(folder, max_num_seqs=slots).generate(requests)
    assert captures.replays > captures.count > 0
    monkeypatch.undo()
    assert_equal(results, loaded(folder, max_num_seqs=slots).generate(requests))


def test_a_size_is_captured_at_its_second_step_and_then_replayed(make_folder, captures):
    """Five sequences of one length take eight slots of a cache of eight, in one width."""
    engine = loaded(make_folder())
    engine.generate([Request(f"r{i}", [i], SamplingParams(2, ignore_eos=True), i) for i in range(8)])
    engine.generate([Request(f"r{i}", [i], SamplingParams(20, ignore_eos=True), i) for i in range(5)])
    # Nineteen steps after the prompt: the size was seen before, so that all of them are replayed.
    assert (captures.count, captures.replays) == (1, 19)
    assert {rows for step in captures.steps for rows, _ in step._graphs} == {8}


def test_graphs_follow_new_weights_and_a_grown_cache(make_folder, monkeypatch, captures):
    engine = loaded(make_folder(seed=0))
    requests = mixed_requests()
    engine.generate(requests[:2])
    engine.load_hf(str(make_folder(seed=1)), version=1)
    results = engine.generate(requests)
    engine.sleep()
    engine.wake()
    engine.load_hf(str(make_folder(seed=1)), version=2)
    again = engine.generate(requests)
    monkeypatch.undo()
    expected = loaded(make_folder(seed=1)).generate(requests)
    assert_equal(results, expected)
    assert_equal(again, expected)


def test_old_graphs_are_dropped(make_folder, monkeypatch, captures):
    monkeypatch.setattr(decode_step, "MAX_GRAPHS", 2)
    loaded(make_folder()).generate(mixed_requests())
    assert all(len(step._graphs) <= 3 for step in captures.steps)


def test_a_failed_capture_is_logged_and_steps_continue_eagerly(make_folder, monkeypatch, captures, caplog):
    captures.fails = True
    requests = mixed_requests()
    results = loaded(make_folder()).generate(requests)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "operation not permitted" in caplog.text
    monkeypatch.undo()
    assert_equal(results, loaded(make_folder()).generate(requests))


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
