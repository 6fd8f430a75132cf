"""Images in the real SGLang: its reading of our requests, and generation."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_engines import API_KEY
from support import vision_families, vision_models
from support.expected_errors import raises
from support.vision_families import as_published, save_family
from support.vision_models import END, IMAGE, START, VOCABULARY, png, save_vision_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from weight_syncs import update

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import image_spans, multimodal_positions, with_placeholders
from megarl.models import read_model_config
from megarl.rollout import Request, SamplingParams, create_engine
from megarl.rollout.serving import EngineServer
from megarl.rollout.sglang.backend import request_payload
from megarl.rollout.sglang.options import SGLangOptions, load_shim, request_of, server_arg_names, server_args

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A prompt with two images, the second one twice, and its fields; SGLang can be imported."""
    folder = tmp_path_factory.mktemp("vision")
    save_vision_model(folder)
    read = ImageProcessor(str(folder)).read
    images = [read(png(140, 84), "0"), read(png(56, 112, 1), "1")]
    first, second = ([START, *image.token_ids, END] for image in images)
    ids = [1, *first, 5, *second, *second, 6]
    request = Request("r", ids, SamplingParams(3), 5, images=images)
    payload = request_payload(request, "x-1", frozenset({7}), 0, read_model_config(folder).vision)
    grids = torch.tensor([[1, 2 * span.rows, 2 * span.columns] for span in image_spans(ids)])
    load_shim()
    return SimpleNamespace(folder=str(folder), ids=ids, images=images, payload=payload, grids=grids)


def test_the_request_is_one_of_sglangs(sent):
    request = request_of("GenerateReqInput", sent.payload)
    request.normalize_batch_and_arguments()
    assert request.is_single and request.contains_mm_input()
    assert request.image_data == sent.payload["image_data"] and request.input_ids == sent.payload["input_ids"]


def test_sglang_reads_the_files(sent):
    from sglang.srt.utils.common import get_image_bytes

    first, second = (image.data for image in sent.images)
    assert [get_image_bytes(url) for url in sent.payload["image_data"]] == [first, second, second]


def test_sglang_expands_the_ids_to_ours(sent):
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    processor = SimpleNamespace(IM_TOKEN_ID=IMAGE, spatial_merge_size=2)
    expand = BaseMultimodalProcessor.build_input_ids
    ids, offsets, _ = expand(processor, sent.payload["input_ids"], img_grid_thw=sent.grids)
    assert ids == with_placeholders(sent.ids, IMAGE)
    assert offsets == [(span.start, span.stop - 1) for span in image_spans(sent.ids)]


def test_sglang_has_our_positions(sent):
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=START,
        model_type="qwen2_5_vl",
        tokens_per_second=2,
        input_ids=torch.tensor([with_placeholders(sent.ids, IMAGE)]),
        image_grid_thw=sent.grids,
    )
    ours = multimodal_positions(sent.ids)
    assert positions.squeeze(1).tolist() == ours.tolist()
    assert delta.item() == ours.max() + 1 - len(sent.ids)


def test_sglang_has_the_arguments(sent):
    engine = SGLangOptions(device="cuda", image_options={"max_pixels": 50176})
    assert set(server_args(sent.folder, 64, engine)) <= server_arg_names()


def saved(folder, monkeypatch, seed, family):
    """A model of the sizes that SGLang needs on a CPU, with a tokenizer; its weights follow from the seed."""
    if family == "qwen2_5_vl":
        monkeypatch.setitem(vision_models.TOWER, "out_hidden_size", 64)
        positions = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        model = save_vision_model(folder, hidden_size=64, rope_parameters=positions)
    else:
        text, tower = vision_families.TEXTS[family], vision_families.TOWERS[family]
        sizes = {"hidden_size": 64} | ({"moe_intermediate_size": 96} if "moe_intermediate_size" in text else {})
        monkeypatch.setitem(vision_families.TEXTS, family, text | sizes)
        # SGLang's model with experts adds the features of three layers, as published ones have.
        layers = {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1, 2]}
        monkeypatch.setitem(vision_families.TOWERS, family, tower | layers)
        model = save_family(folder, family)
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.add_(0.02 * seed * torch.ones_like(parameter).cumsum(0).sin())
    model.save_pretrained(folder)
    as_published(folder, family)
    special = {1: "<|endoftext|>", IMAGE: "<|image_pad|>", IMAGE + 1: "<|video_pad|>"}
    special |= {START: "<|vision_start|>", END: "<|vision_end|>"}
    words = {special.get(number, f"word{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, "word2"))
    names = list(special.values())
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=names[0], additional_special_tokens=names[1:]
    ).save_pretrained(folder)
    return str(folder)


IMAGE_OPTIONS = {"max_pixels": 28 * 28 * 16}


def assert_generates_as_the_embedded_engine(engine, first, second):
    """After loading a folder, and after a sync of the language model alone."""
    read = ImageProcessor(first, IMAGE_OPTIONS).read
    images = [read(png(140, 84), "0"), read(png(56, 112, 1), "1"), read(png(300, 280, 2), "large")]
    large, params = images[2], SamplingParams(8, temperature=0.0, ignore_eos=True)
    assert large.rows * large.columns <= 16
    parts = [[9, 8], [1, START, *images[0].token_ids, END], [1, START, *large.token_ids, END, 4, START]]
    parts[2] += [*images[1].token_ids, END, 5]
    used = [[], images[:1], [large, images[1]]]
    requests = [Request(f"r{n}", ids, params, n, images=used[n]) for n, ids in enumerate(parts)]
    expected = create_engine("embedded", first, SGLangOptions(image_options=IMAGE_OPTIONS))
    engine.load_hf(first)
    for version, folder in enumerate((first, second)):
        if version:
            update(engine, folder, version)
        expected.load_hf(folder)
        for ours, theirs in zip(expected.generate(requests), engine.generate(requests), strict=True):
            assert theirs.token_ids == ours.token_ids
            assert theirs.log_probs == pytest.approx(ours.log_probs, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen2_5_vl", 1), ("qwen2_5_vl", 2), ("qwen3_vl", 1), ("qwen3_vl", 2), ("qwen3_vl_moe", 1)]
)
def test_sglang_generates_as_the_embedded_engine_does(tmp_path, monkeypatch, family, ranks):
    """Options reach SGLang's image processor; several ranks split the tower, too."""
    folders = [saved(tmp_path / str(seed), monkeypatch, seed, family) for seed in range(2)]
    options = SGLangOptions(image_options=IMAGE_OPTIONS, tensor_parallel_size=ranks)
    engine = create_engine("sglang", folders[0], options)
    try:
        assert_generates_as_the_embedded_engine(engine, *folders)
    finally:
        engine.shutdown()


def test_a_running_server_generates_with_images(tmp_path, monkeypatch):
    folders = [saved(tmp_path / str(seed), monkeypatch, seed, "qwen2_5_vl") for seed in range(2)]
    options = SGLangOptions(image_options=IMAGE_OPTIONS, api_key=API_KEY)
    owner = create_engine("sglang", folders[0], replace(options, mode="http"))
    try:
        attached = replace(options, url=owner.url)
        with raises("sglang.server-mismatch", "mm_process_config"):
            create_engine("sglang", folders[0], replace(attached, image_options={"max_pixels": 784}))
        engine = create_engine("sglang", folders[0], attached)
        assert_generates_as_the_embedded_engine(engine, *folders)
        engine.shutdown()
    finally:
        owner.shutdown()


def draw_placeholders(engine, folder, request):
    """Exchange rows of the output layer, so that a greedy response has the tokens of image and video."""
    file = Path(folder) / "model.safetensors"
    for placeholder in (IMAGE, IMAGE + 1):
        engine.load_hf(folder)
        (done,) = engine.generate([request])
        drawn = next(token for token in done.token_ids if token not in (IMAGE, IMAGE + 1))
        tensors = load_file(file)
        head = tensors["lm_head.weight"]
        head[[drawn, placeholder]] = head[[placeholder, drawn]]
        save_file(tensors, file, metadata={"format": "pt"})
    engine.load_hf(folder)


def test_a_policy_may_draw_the_tokens_of_images_and_videos(tmp_path, monkeypatch):
    """They are text: in responses with and without images, and in prompts without; others begin again."""
    folder = saved(tmp_path / "first", monkeypatch, 0, "qwen2_5_vl")
    image = ImageProcessor(folder).read(png(140, 84), "0")
    params = SamplingParams(8, temperature=0.0, ignore_eos=True)
    prompt = [1, START, *image.token_ids, END, 5]
    text = Request("text", [9, IMAGE, START, 8, IMAGE + 1, 7], params, 0)
    seen = Request("seen", prompt, params, 1, images=[image])
    expected = create_engine("embedded", folder, SGLangOptions())
    draw_placeholders(expected, folder, seen)
    engine = create_engine("sglang", folder, SGLangOptions())
    try:
        engine.load_hf(folder)
        ours, theirs = expected.generate([text, seen]), engine.generate([text, seen])
        assert {IMAGE, IMAGE + 1} <= set(ours[1].token_ids[:6])
        for one, two in zip(ours, theirs, strict=True):
            assert two.token_ids == one.token_ids
            assert two.log_probs == pytest.approx(one.log_probs, abs=1e-5)
        prior = replace(theirs[1], token_ids=theirs[1].token_ids[:6], log_probs=theirs[1].log_probs[:6])
        interrupted = replace(seen, prior=prior)
        assert not engine.can_continue(interrupted) and engine.can_continue(replace(text, prior=prior))
        with raises("sglang.no-continuation"):
            engine.submit([interrupted])
        server = EngineServer(engine)
        server.accept("client", [interrupted])
        done = next(done for _ in range(60) for done in server.completions("client", 1.0))
        assert done.token_ids == theirs[1].token_ids and done.discarded_tokens == 6
    finally:
        engine.shutdown()
