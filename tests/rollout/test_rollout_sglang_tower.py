"""A trained vision tower in the real SGLang: its weights come by weight syncs, split and padded."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_engines import API_KEY
from support import vision_families, vision_models
from support.vision_models import END, START, png
from test_rollout_sglang_vision import saved
from weight_syncs import rank_params, update

from megarl.base.image_files import ImageProcessor
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.verification import tensor_checksum
from megarl.rollout import Request, SamplingParams, create_engine
from megarl.rollout.sglang.options import SGLangOptions
from megarl.sharding.verification import checksums_by_name, compare_checksums, weight_rectangles

pytestmark = pytest.mark.sglang

PARAMS = SamplingParams(8, temperature=0.0, ignore_eos=True)


def saved_pair(folder, monkeypatch, family, ranks):
    """Two models that differ in their towers alone, with an MLP or positions that SGLang pads."""
    if family == "qwen2_5_vl":
        monkeypatch.setitem(vision_models.TOWER, "intermediate_size", 64 * ranks - 4)
    else:
        sizes = {"intermediate_size": 64, "num_position_embeddings": 36}
        monkeypatch.setitem(vision_families.TOWERS, family, vision_families.TOWERS[family] | sizes)
    first, second = saved(folder / "first", monkeypatch, 0, family), folder / "second"
    shutil.copytree(first, second)
    tensors = load_file(second / "model.safetensors")
    for name, tensor in tensors.items():
        if "visual" in name:
            tensor.add_(0.05 * torch.ones_like(tensor).cumsum(0).sin())
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    return first, str(second)


def requests_of(folder):
    read = ImageProcessor(folder).read
    images = [read(png(140, 84), "0"), read(png(56, 112, 1), "1")]
    first, second = ([START, *image.token_ids, END] for image in images)
    return [
        Request("text", [9, 8], PARAMS, 0),
        Request("one", [1, *first], PARAMS, 1, images=images[:1]),
        Request("two", [1, *second, 4, *first, 5], PARAMS, 2, images=images),
    ]


def assert_generates_as(expected, engine, requests):
    """Returns the log-probs of each request."""
    ours, theirs = expected.generate(requests), engine.generate(requests)
    for one, two in zip(ours, theirs, strict=True):
        assert two.token_ids == one.token_ids
        assert two.log_probs == pytest.approx(one.log_probs, abs=1e-5)
    return [two.log_probs for two in theirs]


def sums_of(engine):
    """Checksums that a verified sync compares, by rank."""
    params = rank_params(engine)
    rectangles = [weight_rectangles(shard, torch.float32, ()) for shard in params]
    return [checksums_by_name(p, s) for p, s in zip(params, engine.rectangle_checksums(rectangles), strict=True)]


def assert_holds(engine, folder):
    for rank, shard in enumerate(rank_params(engine)):
        tensors = load_local(HFReader(folder), shard, torch.float32)
        assert engine.checksum(rank) == {name: tensor_checksum(tensor) for name, tensor in tensors}


@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen2_5_vl", 1), ("qwen2_5_vl", 2), ("qwen3_vl", 1), ("qwen3_vl", 2), ("qwen3_vl_moe", 1)]
)
def test_a_sync_brings_the_tower(tmp_path, monkeypatch, family, ranks):
    """SGLang starts without weights; the features of the same images change with the tower alone."""
    first, second = saved_pair(tmp_path, monkeypatch, family, ranks)
    requests, options = requests_of(first), SGLangOptions(trained_tower=True, tensor_parallel_size=ranks)
    engine = create_engine("sglang", first, options)
    expected = create_engine("embedded", first, SGLangOptions(trained_tower=True))
    try:
        seen = []
        for version, folder in enumerate((first, second)):
            update(engine, folder, version)
            update(expected, folder, version)
            assert_holds(engine, folder)
            compare_checksums(sums_of(expected), sums_of(engine), ranks)
            seen.append(assert_generates_as(expected, engine, requests))
        engine.load_hf(first, 2)
        expected.load_hf(first, 2)
        assert assert_generates_as(expected, engine, requests) == [pytest.approx(probs, abs=1e-5) for probs in seen[0]]
        text, *others = zip(*seen, strict=True)
        assert text[1] == pytest.approx(text[0], abs=1e-5)
        for before, after in others:
            assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2
    finally:
        engine.shutdown()


def test_engines_with_frozen_and_trained_towers_share_a_server(tmp_path, monkeypatch):
    """The second run trains the tower that the server has read from the folder; the third has the folder's again."""
    first, second = saved_pair(tmp_path, monkeypatch, "qwen2_5_vl", 1)
    requests, options = requests_of(first), SGLangOptions(api_key=API_KEY)
    server = create_engine("sglang", first, replace(options, mode="http"))
    try:
        runs = {False: replace(options, url=server.url), True: replace(options, url=server.url, trained_tower=True)}
        for version, (trained, folder) in enumerate([(True, second), (False, first)]):
            engine, expected = (create_engine(name, folder, runs[trained]) for name in ("sglang", "embedded"))
            update(engine, folder, version)
            update(expected, folder, version)
            assert_generates_as(expected, engine, requests)
            engine.shutdown()
    finally:
        server.shutdown()
