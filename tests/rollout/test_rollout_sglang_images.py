"""Requests with images for SGLang, its arguments, and the vision tower in weight updates."""

import base64
import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as pil
from support.expected_errors import raises
from support.vision_models import END, IMAGE, START, png, save_vision_model

from megarl.base.errors import ConfigError, ModelError, TeacherError, WeightSyncError
from megarl.base.image_files import ImageProcessor, decode_image
from megarl.base.image_tokens import Image
from megarl.config.schema.distillation import TeacherServerConfig
from megarl.models import read_model_config
from megarl.rollout import Request, RolloutError, SamplingParams, check_engine_model
from megarl.rollout.interface import Completion, RequestRefused
from megarl.rollout.sglang import backend, options
from megarl.rollout.sglang.backend import ImageURLs, ResponseContext, parse_completion, request_payload
from megarl.rollout.sglang.http import _check_server_info
from megarl.rollout.sglang.options import SGLangOptions, server_args
from megarl.rollout.sglang.teacher import TeacherServers, TokenRow
from megarl.sharding.sglang_loader import RankLoader, SGLangShard

OPTIONS = {"max_pixels": 50176}


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    save_vision_model(folder)
    read = ImageProcessor(str(folder)).read
    images = {"first": read(png(56, 112), "first"), "second": read(png(140, 84, 1), "second")}
    return SimpleNamespace(folder=str(folder), config=read_model_config(folder), **images)


@pytest.fixture
def request_with_images(vision):
    """The second image, text, and the first one twice."""
    first, second = ([START, *image.token_ids, END] for image in (vision.first, vision.second))
    ids = [1, *second, 5, *first, *first, 6]
    return Request("r", ids, SamplingParams(3), 5, images=[vision.first, vision.second])


def payload_of(request, vision):
    return request_payload(request, "x-1", frozenset({7}), 0, vision.config.vision)


def test_each_image_has_one_token_in_the_request(vision, request_with_images):
    payload = payload_of(request_with_images, vision)
    assert payload["input_ids"] == [1, START, IMAGE, END, 5, *[START, IMAGE, END] * 2, 6]
    files = [base64.b64decode(url.removeprefix("data:;base64,")) for url in payload["image_data"]]
    assert files == [vision.second.data, vision.first.data, vision.first.data]
    text = Request("r", [1, 2], SamplingParams(3), 5)
    assert "image_data" not in payload_of(text, vision) and payload_of(text, vision)["input_ids"] == [1, 2]


def sent_file(image, urls=None):
    return base64.b64decode((urls or ImageURLs()).of(image).removeprefix("data:;base64,"))


def encoded(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def noise(mode):
    picture = pil.open(io.BytesIO(png(56, 84)))
    if mode == "RGBA":
        picture.putalpha(picture.convert("L"))
    return picture.convert(mode)


TURNED = pil.Exif()
TURNED[274] = 6  # orientation: a quarter to the right
FILES = {
    "RGBA": lambda: encoded(noise("RGBA")),
    "palette": lambda: encoded(noise("P"), transparency=bytes(range(256))),
    "transparent color": lambda: encoded(noise("RGB"), transparency=noise("RGB").getpixel((3, 5))),
    "grey": lambda: encoded(noise("L")),
    "JPEG": lambda: encoded(noise("RGB"), "JPEG", exif=TURNED, icc_profile=b"profile"),
    "turned": lambda: encoded(noise("RGB"), exif=TURNED),
    "BMP": lambda: encoded(noise("RGB"), "BMP"),
}


@pytest.mark.parametrize("name", FILES)
def test_sglang_gets_the_pixels_of_training(vision, name):
    image = Image.of(FILES[name](), 2, 3)
    request = Request("r", [START, *image.token_ids, END], SamplingParams(3), 5, images=[image])
    (url,) = payload_of(request, vision)["image_data"]
    sent = pil.open(io.BytesIO(base64.b64decode(url.removeprefix("data:;base64,"))))
    sent.load()
    assert (sent.format, sent.mode, sent.info, dict(sent.getexif())) == ("PNG", "RGB", {}, {})
    assert np.array_equal(np.asarray(sent), np.asarray(decode_image(image.data, name)))


def test_an_opaque_png_is_sent_as_it_is():
    for data in (png(56, 84), encoded(noise("RGB"), dpi=(72, 72)), encoded(noise("RGB"), optimize=True)):
        assert sent_file(Image.of(data, 2, 3)) == data
    longer = png(56, 84) + b"more"
    assert sent_file(Image.of(longer, 2, 3)) != longer


def test_the_last_used_urls_are_held(monkeypatch):
    images, encodings = [Image.of(png(28, 28, seed), 1, 1) for seed in range(3)], []
    monkeypatch.setattr(backend, "URL_CACHE_BYTES", 2 * len(ImageURLs().of(images[0])) + 100)
    monkeypatch.setattr(backend, "lossless_png", lambda data, _: encodings.append(data) or data)
    urls = ImageURLs()
    for number in (0, 1, 0, 2, 0, 1):  # 2 displaces 1, and the last one 2
        assert sent_file(images[number], urls) == images[number].data
    assert encodings == [images[number].data for number in (0, 1, 2, 1)]


def test_a_continued_request_has_its_images(vision, request_with_images):
    prior = Completion("r", [8], [-1.0], "abort", 1)
    payload = payload_of(replace(request_with_images, prior=prior).remainder, vision)
    assert payload["input_ids"][-2:] == [6, 8] and len(payload["image_data"]) == 3


@pytest.mark.parametrize("token", [IMAGE, IMAGE + 1])
def test_tokens_of_images_and_videos_in_a_text_are_refused(vision, request_with_images, token):
    request = replace(request_with_images, prompt_ids=[*request_with_images.prompt_ids, token])
    with raises("sglang.image-placeholder", token, error=RequestRefused):
        payload_of(request, vision)


@pytest.mark.parametrize("difference", [0, -1, 1])
def test_sglangs_number_of_prompt_tokens_is_compared(request_with_images, difference):
    meta = {
        "output_token_logprobs": [(-1.0, 5, None)] * 3,
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(request_with_images.prompt_ids) + difference,
    }
    response = {"output_ids": [5] * 3, "meta_info": meta}
    if not difference:
        assert parse_completion(request_with_images, response, ResponseContext(frozenset(), 0)).token_ids == [5] * 3
        return
    with raises("engine.image-token-count", meta["prompt_tokens"], error=RolloutError):
        parse_completion(request_with_images, response, ResponseContext(frozenset(), 0))


def test_models_with_images_are_refused_in_fp8(vision):
    check_engine_model("sglang", vision.config, SGLangOptions(device="cuda"))
    quantized = SGLangOptions(device="cuda", quantization="fp8", dtype="bfloat16")
    with raises("sglang.fp8-model", "Qwen2_5_VLForConditionalGeneration", error=ModelError):
        check_engine_model("sglang", vision.config, quantized)


def test_sglang_processes_images_as_training_does(vision, monkeypatch):
    monkeypatch.setattr(options, "server_arg_names", frozenset)
    monkeypatch.setattr(options, "is_installed", lambda name: False)
    arguments = server_args(vision.folder, 64, SGLangOptions(device="cuda", image_options=OPTIONS))
    assert arguments["load_format"] == "auto"
    assert arguments["image_processor_backend"] == "pil"
    assert arguments["mm_process_config"] == {"image": OPTIONS}
    assert arguments["mm_preprocess_cache_size_mb"] > 0
    users = SGLangOptions(device="cuda", server_args={"mm_preprocess_cache_size_mb": 99})
    assert server_args(vision.folder, 64, users)["mm_preprocess_cache_size_mb"] == 99
    assert "mm_process_config" not in server_args(vision.folder, 64, users)


@pytest.mark.parametrize("name", ["image_processor_backend", "mm_process_config"])
def test_the_engine_sets_the_image_processor_itself(vision, name):
    with raises("sglang.engine-argument", name, error=ConfigError):
        server_args(vision.folder, 64, SGLangOptions(device="cuda", server_args={name: {}}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("load_format", "dummy"), ("image_processor_backend", "auto"), ("mm_process_config", {})],
)
def test_a_running_server_must_have_the_tower_and_the_image_processor(vision, name, value):
    engine = SGLangOptions(device="cuda", image_options=OPTIONS, deterministic=False)
    info = {"load_format": "auto", "image_processor_backend": "pil", "mm_process_config": {"image": OPTIONS}}
    _check_server_info("http://host:1", info, vision.folder, engine)
    with raises("sglang.server-mismatch", name, error=ConfigError):
        _check_server_info("http://host:1", info | {name: value}, vision.folder, engine)


def test_a_running_server_may_have_no_further_settings_of_its_image_processor(vision):
    engine = SGLangOptions(device="cuda", deterministic=False)
    for none in ({}, {"mm_process_config": None}, {"mm_process_config": {}}):
        _check_server_info("http://host:1", none, vision.folder, engine)
    with raises("sglang.server-mismatch", "mm_process_config", error=ConfigError):
        _check_server_info("http://host:1", {"mm_process_config": {"image": OPTIONS}}, vision.folder, engine)


class Model(torch.nn.Module):
    """Parameters by dotted name, as SGLang's model has them."""

    def __init__(self, shapes):
        super().__init__()
        self.held = {name: torch.nn.Parameter(torch.full(shape, 3.0)) for name, shape in shapes.items()}

    def named_parameters(self):
        return self.held.items()

    def parameters(self):
        return iter(self.held.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_tower_is_no_part_of_a_shard(vision, tp):
    """SGLang names the decoder's parameters as the weight map does."""
    shard = SGLangShard(vision.config, tp, 0)
    model = Model(shard._shapes(shard._places) | {"visual.blocks.0.norm1.weight": [4], "lm_head.bias": [1]})
    with raises("sglang.parameter-extra", "'lm_head.bias'", error=WeightSyncError):
        shard.views(model)
    del model.held["lm_head.bias"]
    assert shard.views(model).keys() == {param.name for param in shard.params}
    assert "model.layers.3.self_attn.qkv_proj.bias" in shard.views(model)


def test_an_update_restores_the_tower_that_sleep_has_freed(vision):
    shard = SGLangShard(vision.config, 1, 0)
    model = Model(shard._shapes(shard._places) | {"visual.blocks.0.norm1.weight": [4]})
    tower = model.held["visual.blocks.0.norm1.weight"].data
    rank = RankLoader()
    rank.attach(model, shard)
    tower.zero_()
    rank.attach(model, shard)  # of the next engine at a running server
    rank._receiver = SimpleNamespace(begin=lambda version: None)
    rank.begin(model, 1)
    assert (tower == 3.0).all()


def test_a_teacher_behind_sglang_grades_no_images(vision):
    servers = TeacherServers("teacher", TeacherServerConfig(urls=["http://127.0.0.1:1"]))
    with raises("teacher.images", "teacher", error=TeacherError):
        servers.grade([TokenRow([1], [2]), TokenRow(vision.first.token_ids, [2])])
