"""A request with images, read by SGLang's own types and functions."""

from types import SimpleNamespace

import pytest
import torch
from support.vision_models import END, IMAGE, START, png, save_vision_model

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import image_spans, multimodal_positions, with_placeholders
from megarl.models import read_model_config
from megarl.rollout import Request, SamplingParams
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
