"""Embedded engine with images, against transformers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.expected_errors import raises
from support.vision_families import FAMILIES, save_family
from support.vision_models import END, IMAGE, START, VOCABULARY, png

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_spans, with_placeholders
from megarl.models import vision_tower
from megarl.models.rope import inverse_frequencies
from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine
from megarl.rollout.embedded.decoder import RotaryTable, TransformerDecoder
from megarl.rollout.interface import RequestRefused

NEW = 12
GREEDY = SamplingParams(NEW, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return with_pictures(tmp_path_factory.mktemp("vision"))


def with_pictures(folder, family="qwen2_5_vl"):
    """A tiny model, its folder, and pictures by name; a and c have equal sizes."""
    model = save_family(folder, family)
    read = ImageProcessor(str(folder)).read
    sizes = {"a": (56, 112), "b": (140, 84), "c": (56, 112), "odd": (57, 203), "tall": (300, 31), "large": (196, 168)}
    images = {name: read(png(*size, seed), name) for seed, (name, size) in enumerate(sizes.items())}
    return SimpleNamespace(folder=str(folder), model=model, **images)


@pytest.fixture
def engine(vision):
    with_weights = loaded(vision)
    yield with_weights
    with_weights.shutdown()


def loaded(vision, **options):
    engine = create_engine("embedded", vision.folder, EngineOptions(**options))
    engine.load_hf(vision.folder)
    return engine


def request(name, *parts, params=GREEDY, seed=0):
    """A prompt of token ids, and images between their start and end tokens."""
    ids = []
    for part in parts:
        ids += [START, *part.token_ids, END] if isinstance(part, Image) else part
    return Request(name, ids, params, seed, images=[part for part in parts if isinstance(part, Image)])


def model_inputs(vision, request, ids):
    """Inputs of transformers' model for a prompt with its response."""
    inputs = {"input_ids": torch.tensor(with_placeholders(ids, IMAGE))[None]}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    spans, images = image_spans(ids), {image.key: image for image in request.images}
    if spans:
        patches = [ImageProcessor(vision.folder).patches(images[span.key]) for span in spans]
        inputs["pixel_values"] = torch.cat([torch.from_numpy(values) for values in patches])
        inputs["image_grid_thw"] = torch.tensor([[1, 2 * span.rows, 2 * span.columns] for span in spans])
    return inputs


@torch.no_grad()
def expected_tokens(vision, request):
    length = len(request.prompt_ids)
    output = vision.model.generate(
        **model_inputs(vision, request, request.prompt_ids), do_sample=False, max_new_tokens=NEW, eos_token_id=None
    )
    return output[0, length:].tolist()


@torch.no_grad()
def expected_log_probs(vision, request, tokens):
    ids = [*request.prompt_ids, *tokens]
    logits = vision.model(**model_inputs(vision, request, ids)).logits[0, len(request.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check_log_probs(vision, request, completion):
    expected = expected_log_probs(vision, request, completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def check(vision, engine, requests):
    """Generate, and compare tokens and log-probs with transformers'."""
    completions = engine.generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids == expected_tokens(vision, request), request.request_id
        check_log_probs(vision, request, completion)
    return completions


def mixed_prompts(vision):
    return [
        request("text", [9, 8, 7]),
        request("one", [1, 2, 3], vision.a, [4, 5]),
        request("two", vision.b, [5], vision.odd),
        request("three", [6], vision.tall, vision.a, [7], vision.large, [8, 9, 10]),
        request("twice", vision.c, [3], vision.c, [4]),
    ]


def test_mixed_prompts_generate_as_in_transformers(vision, engine):
    check(vision, engine, mixed_prompts(vision))


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_generate_as_in_transformers(tmp_path, family):
    vision = with_pictures(tmp_path, family)
    engine = loaded(vision)
    check(vision, engine, mixed_prompts(vision))
    engine.shutdown()


def test_a_prompt_may_end_with_the_tokens_of_an_image(vision, engine):
    whole = request("ends", [1], vision.b)
    check(vision, engine, [replace(whole, prompt_ids=whole.prompt_ids[:-1])])


def test_later_turns_may_show_images(vision, engine):
    prompts = [("image", [[1, 2, 3], vision.a, [4, 5]]), ("text", [[7, 8]]), ("both", [[9], vision.b, [3]])]
    first = check(vision, engine, [request(name, *parts) for name, parts in prompts])
    shown = {"image": [vision.odd], "text": [vision.c], "both": [vision.b, [6], vision.tall]}
    turns = [
        request(f"{name} 2", *parts, completion.token_ids, *shown[name], [11])
        for (name, parts), completion in zip(prompts, first, strict=True)
    ]
    second = check(vision, engine, turns)
    third = request("third", *prompts[0][1], first[0].token_ids, vision.odd, [11], second[0].token_ids, vision.a, [4])
    check(vision, engine, [third])


def test_equal_texts_with_different_pictures_differ(vision, engine):
    first, second = check(vision, engine, [request(name, [1], getattr(vision, name), [2]) for name in ("a", "c")])
    assert abs(first.log_probs[0] - second.log_probs[0]) > 1e-3


def test_samples_of_one_prompt_share_its_image(vision, engine):
    sampled = SamplingParams(NEW, ignore_eos=True)
    requests = [
        request(f"{name}{n}", [n % 2], getattr(vision, name), [2], params=sampled, seed=n)
        for name in ("a", "odd")
        for n in range(4)
    ]
    completions = engine.generate(requests)
    for each, completion in zip(requests, completions, strict=True):
        check_log_probs(vision, each, completion)
    assert len({tuple(completion.token_ids) for completion in completions}) == len(requests)


def test_sequences_of_different_lengths_change_slots(vision):
    """Two slots; responses end at different times, and later prompts take their slots."""
    engine = loaded(vision, max_num_seqs=2)
    requests = [
        request(f"{n}", [n], image, [3], params=replace(GREEDY, max_new_tokens=new))
        for n, (image, new) in enumerate([(vision.large, 2), (vision.a, 9), (vision.b, 3), (vision.tall, 5)])
    ]
    for each, completion in zip(requests, engine.generate(requests), strict=True):
        assert completion.token_ids == expected_tokens(vision, each)[: each.params.max_new_tokens]
        check_log_probs(vision, each, completion)


def test_a_shared_prefix_may_have_images(vision, engine, monkeypatch):
    sizes, forward = [], TransformerDecoder.hidden

    def counting(self, tokens, *args, **kwargs):
        sizes.append(len(tokens))
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(TransformerDecoder, "hidden", counting)
    start = [[1, 2], vision.large, [3]]
    requests = [request(f"{n}", *start, [10 + n, *range(n)]) for n in range(3)]
    check(vision, engine, [*requests, request("image", *start, vision.a, [4])])
    assert sizes[0] == 2 + 1 + vision.large.rows * vision.large.columns + 1 + 1


def test_a_shared_prefix_may_end_within_an_image(vision, engine):
    """One prompt ends with the image that others continue after; a prompt computes its last token itself."""
    requests = [request(f"{n}", [1, 2, 3], vision.large, [4] * n) for n in range(3)]
    ends_in_image = replace(requests[0], request_id="ends", prompt_ids=requests[0].prompt_ids[:-1])
    check(vision, engine, [ends_in_image, *requests])


def test_an_interrupted_response_continues(vision, engine):
    whole = request("r", [1], vision.odd, [2], vision.a, [3])
    (completion,) = engine.generate([whole])
    prior = replace(completion, token_ids=completion.token_ids[:5], log_probs=completion.log_probs[:5])
    (continued,) = engine.generate([replace(whole, prior=prior)])
    assert continued.token_ids == completion.token_ids
    assert continued.log_probs[5:] == pytest.approx(completion.log_probs[5:], abs=1e-5)
    (rest,) = engine.generate([replace(whole, prior=prior).remainder])
    assert rest.token_ids == completion.token_ids[5:]


def test_displaced_features_are_computed_again(vision, monkeypatch):
    monkeypatch.setattr(vision_tower, "HOST_BYTES", 0)
    engine = loaded(vision, max_num_seqs=1)
    requests = [request(name, [1], getattr(vision, name), [2]) for name in ("a", "b", "odd")]
    ended = []
    for each in requests:
        engine.submit([each])
    while len(ended) < len(requests):
        ended += engine.poll(60)
    by_id = {completion.request_id: completion.token_ids for completion in ended}
    assert by_id == {each.request_id: expected_tokens(vision, each) for each in requests}


def test_images_work_after_sleep(vision, engine):
    before = engine.generate([request("r", [1], vision.a)])
    engine.sleep()
    engine.wake()
    engine.load_hf(vision.folder, 1)
    (after,) = engine.generate([request("r", [1], vision.a)])
    assert after.log_probs == before[0].log_probs


def test_the_image_processor_has_the_engines_options(vision):
    options = {"max_pixels": 4 * 28 * 28}
    small = ImageProcessor(vision.folder, options).read(png(196, 168), "small")
    assert small.rows * small.columns <= 4
    engine = loaded(vision, image_options=options)
    (completion,) = engine.generate([request("r", small, [1])])
    assert len(completion.token_ids) == NEW
    with raises("image.token-count", error=RequestRefused):
        engine.submit([request("other", vision.large, [1])])


WRONG = {
    "rollout.image-missing": lambda v: replace(request("r", [1], v.a), images=[]),
    "rollout.image-unused": lambda v: replace(request("r", [1], v.a), images=[v.a, v.b]),
    "rollout.image-tokens": lambda v: replace(request("r", v.a), prompt_ids=v.a.token_ids[1:]),
    "image.unknown-format": lambda v: request("r", [1], Image.of(b"no picture", 2, 2)),
    "image.token-count": lambda v: request("r", [1], Image.of(v.a.data, v.a.columns, v.a.rows)),
    "rollout.token-id-range": lambda v: request("r", [VOCABULARY], v.a),
}


@pytest.mark.parametrize("code", WRONG)
def test_wrong_images_are_refused(vision, engine, code):
    with raises(code, error=RequestRefused):
        engine.submit([request("fine", [1], vision.b), WRONG[code](vision)])
    check(vision, engine, [request("fine", [1], vision.b)])


def test_an_image_with_another_grid_is_missing(vision, engine):
    turned = replace(vision.b, rows=vision.b.columns, columns=vision.b.rows)
    with raises("rollout.image-missing", f"{vision.b.key:x}", error=RequestRefused):
        engine.submit([replace(request("r", [1], vision.b), images=[turned])])


def test_responses_have_no_images(vision, engine):
    (completion,) = engine.generate([request("r", [1], vision.a)])
    prior = replace(completion, token_ids=vision.a.token_ids, log_probs=[0.0] * len(vision.a.token_ids))
    with raises("rollout.token-id-range", "prior", error=RequestRefused):
        engine.submit([replace(request("r", [1], vision.a, params=SamplingParams(99)), prior=prior)])


def test_a_text_model_takes_no_images(vision, make_folder):
    folder = str(make_folder())
    engine = create_engine("embedded", folder)
    engine.load_hf(folder)
    with raises("rollout.token-id-range", error=RequestRefused):
        engine.submit([request("r", vision.a)])
    with raises("rollout.image-unused", error=RequestRefused):
        engine.submit([replace(request("r", [1]), images=[vision.a])])


def test_three_equal_positions_rotate_as_one(engine):
    config = engine.config
    table = RotaryTable(config, inverse_frequencies(config), 1.0, 512, torch.device("cpu"))
    positions, heads = torch.tensor([0, 3, 511, 77]), torch.randn(4, 2, config.head_dim)
    assert torch.equal(table.rotation(positions.expand(3, -1))(heads), table.rotation(positions)(heads))
