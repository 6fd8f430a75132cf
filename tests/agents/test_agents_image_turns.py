"""Images in later turns: of tools and loops, in requests, trajectories, batches and checkpoints."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from image_cases import part, picture, png, squares_reader, url, url_part
from make_squares import CHAT_TEMPLATE, task_tokenizer
from PIL import Image as pil
from support.expected_errors import raises

from megarl.agents import AgentLoop, Transcript
from megarl.agents.frames import turn_frame
from megarl.agents.loop import read_images
from megarl.agents.runner import lead_conversation
from megarl.agents.tool_agent import ToolLoop, ToolOptions
from megarl.agents.tools import Tool, ToolResult
from megarl.agents.tools.tool import ToolEntry
from megarl.agents.trajectories import PackedSamples, trajectories_to_batch
from megarl.agents.types import AgentError, Conversation, SampleId
from megarl.base.image_files import decode_image
from megarl.base.image_tokens import image_key
from megarl.data.images import IMAGES
from megarl.data.tokenizers import characters_per_token
from megarl.rewards.scorer import decode_text
from megarl.rollout.interface import Completion, SamplingParams
from megarl.samples.rollouts import _row_images
from megarl.samples.service import _restored_trajectory, _stored_trajectory
from megarl.trainer.state.trainer_state import Decoder, Encoder

USER = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many squares?"}]}
SCHEMA = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return task_tokenizer()


@pytest.fixture(scope="module")
def reader(tmp_path_factory, tokenizer):
    return squares_reader(tmp_path_factory.mktemp("processor"), tokenizer)


@pytest.fixture
def conversation(reader):
    image = reader.processor.read(png(10), "prompt")
    facts = {IMAGES: (image,)}
    return Conversation([USER], SamplingParams(60), facts=facts, image_reader=reader, images=[image])


class Show(Tool):
    """Answers with the content of its configuration."""

    schema = SCHEMA

    async def call(self, arguments, conversation):
        return self.config["content"]


class Turns:
    """Generates texts in turn, and keeps the contexts."""

    def __init__(self, tokenizer, *texts):
        self.turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.contexts = []

    async def __call__(self, prompt_ids, params, *, seed, key):
        self.contexts.append(list(prompt_ids))
        ids = self.turns[len(self.contexts) - 1]
        return Completion("r", ids, [-1.0] * len(ids), "stop", 0)


CALL = '<tool_call>{"name": "zoom", "arguments": {}}</tool_call><|im_end|>'


def lead(tokenizer, conversation, content, *, texts=(CALL, "3<|im_end|>"), **options):
    generate = Turns(tokenizer, *texts)
    loop = ToolLoop(
        tokenizer, {"zoom": ToolEntry(Show(config={"content": content}), retries=0)}, ToolOptions(**options)
    )
    trajectory = asyncio.run(lead_conversation(replace(conversation, params=SamplingParams(200)), loop, generate))
    return trajectory, generate.contexts


def frame_of(tokenizer, ids, *contents):
    """Expected tokens after a closed turn of the policy, with the tokens of images in place of their names."""
    text = "".join(f"<|im_start|>tool\n{content}<|im_end|>\n" for content in contents)
    parts = f"\n{text}<|im_start|>assistant\n".split("<|image_pad|>")
    tokens = tokenizer(parts[0], add_special_tokens=False)["input_ids"]
    for image, following in zip(ids, parts[1:], strict=True):
        tokens = [*tokens, *image, *tokenizer(following, add_special_tokens=False)["input_ids"]]
    return tokens


SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
FORMS = {
    "bytes": part(png(200)),
    "mapping": part({"bytes": png(200)}),
    "bytes field": {"type": "image", "bytes": png(200)},
    "pil": part(picture(200)),
    "url": url_part(url(png(200))),
    "plain url": {"type": "image_url", "image_url": url(png(200))},
    "image with url": part(url(png(200))),
}


def row_images(trajectory, conversation):
    of_prompt = conversation.facts[IMAGES]
    return _row_images(trajectory, of_prompt, {image.key: image for image in (*of_prompt, *trajectory.images)})


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_shows_an_image(tokenizer, reader, conversation, form):
    content = [{"type": "text", "text": "see <image> "}, FORMS[form], {"type": "text", "text": "!"}]
    trajectory, (_, second) = lead(tokenizer, conversation, content)
    assert trajectory.error is None and trajectory.finish_reason == "stop"
    (image,) = trajectory.images
    assert (image.rows, image.columns) == (2, 2)
    pixels = np.asarray(decode_image(image.data, "crop"))
    assert pixels.shape == (56, 56, 3) and (pixels == (200, 200, 0)).all()
    call, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (CALL, "3<|im_end|>"))
    frame = frame_of(tokenizer, [image.token_ids], f"see <image> {SHOWN}!")
    assert trajectory.response_ids == [*call, *frame, *answer]
    assert trajectory.response_mask == [1] * len(call) + [0] * len(frame) + [1] * len(answer)
    assert set(trajectory.log_probs[len(call) : len(call) + len(frame)]) == {0.0}
    assert second == [*trajectory.prompt_ids, *call, *frame]
    assert [each.key for each in row_images(trajectory, conversation)] == [image_key(png(10)), image.key]


def test_several_results_show_several_images(tokenizer, conversation):
    content = [part(png(200)), part(png(100, (112, 56)))]
    trajectory, _ = lead(tokenizer, conversation, ToolResult(content, {"shown": 2.0}), max_parallel_calls=2,
                         texts=(CALL * 2, "3<|im_end|>"))  # fmt: skip
    assert [(image.rows, image.columns) for image in trajectory.images] == [(2, 2), (2, 4)]
    row = row_images(trajectory, conversation)
    assert [image.key for image in row[1:]] == [image.key for image in trajectory.images] * 2
    assert trajectory.metrics["shown"] == 4.0
    assert decode_text(tokenizer, trajectory.response_ids).count("<image>") == 4


def test_the_image_of_the_prompt_may_be_shown_again(tokenizer, conversation):
    trajectory, _ = lead(tokenizer, conversation, [part(png(10))])
    assert not trajectory.images
    assert row_images(trajectory, conversation) == conversation.facts[IMAGES] * 2


def test_long_texts_beside_an_image_are_cut(tokenizer, conversation):
    content = [{"type": "text", "text": "a " * 500}, part(png(200))]
    trajectory, _ = lead(tokenizer, conversation, content, max_tool_response_length=8)
    text = decode_text(tokenizer, trajectory.response_ids)
    assert "truncated" in text and text.count("<image>") == 1 and len(text) < 200


def test_texts_imitate_no_image(tokenizer, conversation):
    trajectory, _ = lead(tokenizer, conversation, [{"type": "text", "text": "<|image_pad|><|im_end|>"}, part(png(9))])
    assert trajectory.error is None and len(trajectory.images) == 1
    assert "<|image_pad|><|im_end|><image>" in decode_text(tokenizer, trajectory.response_ids)


def test_parts_of_text_are_one_text(tokenizer, conversation):
    trajectory, _ = lead(tokenizer, conversation, [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}])
    assert "tool\n42" in decode_text(tokenizer, trajectory.response_ids) and not trajectory.images


def read(conversation, messages):
    location = "turn 1, message {}, part {}"
    return asyncio.run(read_images(messages, conversation.image_reader, location, check_tokens=lambda tokens: None))


def bad_png():
    return png(3)[:-30]


BAD = {
    "image.damaged": part(bad_png()),
    "image.unknown-format": part(b"GIF89a"),
    "image.entry-type": part(7),
    "image.color-mode": part(pil.new("CMYK", (56, 56))),
    "image.remote": url_part("https://example.org/a.png"),
    "image.data-url": url_part("data:image/png;base64,%%%"),
    "image.part-type": {"type": "video"},
    "image.processor-refuses": part(picture(3, (4, 4000))),
}


@pytest.mark.parametrize("code", BAD)
def test_a_bad_image_fails_the_conversation(tokenizer, reader, conversation, code):
    messages = [{"role": "tool", "content": "fine"}, {"role": "tool", "content": [part(png(1)), BAD[code]]}]
    with raises(code, "turn 1, message 1, part 1"):
        read(conversation, messages)
    trajectory, contexts = lead(tokenizer, conversation, [part(png(1)), BAD[code]])
    assert "turn 1 of the environment, message 0, part 1" in trajectory.error and len(contexts) == 1
    assert trajectory.finish_reason == "error" and not any(trajectory.response_mask)


@pytest.mark.parametrize(
    ("image", "field"),
    [
        ({**part(png(1)), "max_pixels": 100}, "max_pixels=100"),
        (part({"bytes": png(1), "resized_height": 28}), "resized_height=28"),
        ({**url_part(url(png(1))), "cache_control": {}}, "cache_control={}"),
        ({"type": "image_url", "image_url": {"url": url(png(1)), "detail": "high"}}, "detail='high'"),
    ],
)
def test_fields_without_effect_are_refused(conversation, image, field):
    with raises("image.part-field", "turn 1, message 0, part 0", field):
        read(conversation, [{"role": "user", "content": [image]}])


def test_null_and_neutral_fields_are_read(conversation):
    shown = {"type": "image_url", "text": None, "image_url": {"url": url(png(1)), "detail": "auto"}}
    _, (image,) = read(conversation, [{"role": "user", "content": [shown]}])
    assert image.data == png(1)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "/etc/passwd", "data:text/plain;base64,aGk=", "a.png"])
def test_no_file_or_address_is_opened(conversation, address):
    for image in (url_part(address), part(address), {"type": "image", "path": address}):
        with raises("image.remote"):
            read(conversation, [{"role": "user", "content": [image]}])


def test_a_policy_of_text_sees_no_image(tokenizer, conversation):
    text_only = replace(conversation, messages=[{"role": "user", "content": "go"}], image_reader=None, facts={})
    trajectory, _ = lead(tokenizer, text_only, [part(png(1))])
    assert "reads text alone" in trajectory.error


@pytest.mark.parametrize("cut", [None, -30])
def test_an_image_without_room_is_not_decoded_and_ends_the_conversation(tokenizer, conversation, cut):
    """Without room, it is not found out that an image is damaged."""
    generate = Turns(tokenizer, CALL, "3")
    loop = ToolLoop(tokenizer, {"zoom": ToolEntry(Show(config={"content": [part(png(1, (560, 560))[:cut])]}))})
    short = replace(conversation, params=SamplingParams(60))
    trajectory = asyncio.run(lead_conversation(short, loop, generate))
    assert trajectory.finish_reason == "length" and trajectory.error is None and not trajectory.images
    assert trajectory.response_ids == generate.turns[0]


class Forger(AgentLoop):
    """Writes tokens of an image that no turn has read, or of half an image."""

    def __init__(self, ids, prompt_ids=(1,)):
        self.ids, self.prompt_ids = ids, prompt_ids

    async def run(self, conversation, generate):
        transcript = Transcript(conversation, self.prompt_ids)
        transcript.observe(self.ids)
        return transcript.end("stop")


def test_tokens_of_unknown_images_fail_the_conversation(conversation, reader):
    other, known = reader.processor.read(png(77), "other"), conversation.images[0]
    halves = known.token_ids[2:], known.token_ids[:2]
    for ids in ((other.token_ids,), (known.token_ids[1:],), (known.token_ids[::-1],), halves):
        trajectory = asyncio.run(lead_conversation(conversation, Forger(*ids), None))
        assert trajectory.error is not None and not trajectory.response_ids and not trajectory.images
    assert asyncio.run(lead_conversation(conversation, Forger(known.token_ids), None)).error is None


class Generator(Forger):
    """Claims that the policy has generated an image."""

    async def run(self, conversation, generate):
        trajectory = await super().run(conversation, generate)
        return replace(trajectory, response_mask=[1] * len(self.ids))


def test_the_policy_generates_no_image(conversation):
    trajectory = asyncio.run(lead_conversation(conversation, Generator(conversation.images[0].token_ids), None))
    assert "response_mask" in trajectory.error and not any(trajectory.response_mask)


@pytest.fixture
def trajectory(tokenizer, conversation):
    return lead(tokenizer, conversation, [part(png(200))])[0]


def test_rows_with_images_in_responses(tokenizer, trajectory):
    packed = PackedSamples({SampleId(0, 0): trajectory, SampleId(0, 1): replace(trajectory, response_ids=[1], images=(),
                            response_mask=[1], log_probs=[0.0])}).unpack()  # fmt: skip
    assert packed[0, 0].response_ids.tolist() == trajectory.response_ids and packed[0, 0].images == trajectory.images
    text_only = PackedSamples({SampleId(0, 1): packed[0, 1]}).unpack()
    assert text_only[0, 1].response_ids.dtype == np.int32
    batch = trajectories_to_batch([packed[0, 0], packed[0, 1]], 0)
    assert batch.unpadded("responses")[0].tolist() == trajectory.response_ids
    everything = trajectories_to_batch([packed[0, 0]], 0, state_masking=False)
    ids = torch.tensor(trajectory.response_ids)
    assert torch.equal(everything.unpadded("response_mask")[0].bool(), ids >= 0)  # an image has no target


def test_a_checkpoint_keeps_the_images_of_ended_samples(trajectory, tmp_path):
    arrays = io.BytesIO()
    encoded = Encoder(arrays).encode(_stored_trajectory(trajectory), "sample")
    Path(tmp_path / "arrays").write_bytes(arrays.getvalue())
    restored = _restored_trajectory(Decoder(tmp_path / "arrays").decode(encoded))
    assert list(restored.images) == list(trajectory.images) and restored.response_ids == trajectory.response_ids


def test_characters_of_images(tokenizer, trajectory):
    ids = trajectory.response_ids
    counts = characters_per_token(ids, tokenizer)
    assert sum(counts) == len(decode_text(tokenizer, ids)) and len(counts) == len(ids)
    first = next(index for index, number in enumerate(ids) if number < 0)
    assert counts[first : first + 4] == [len("<image>"), 0, 0, 0]


def test_a_template_that_hides_images_is_named(reader, conversation):
    other = task_tokenizer()
    other.chat_template = CHAT_TEMPLATE.replace("<|image_pad|>", "")
    image = reader.processor.read(png(1), "picture")
    with raises("image.template-count"):
        turn_frame(other, [{"role": "user", "content": [{"type": "image"}]}], None, None, [image], reader.token)
    transcript = Transcript(conversation, [1])
    with pytest.raises(AgentError) as failure:
        asyncio.run(transcript.observe_messages(other, [{"role": "user", "content": [part(png(1))]}]))
    assert failure.value.code == "image.template-count"


def test_another_image_with_a_known_key_is_refused(conversation):
    (known,) = conversation.images
    other = replace(known, key=known.key + 1)
    conversation.add_images([known, replace(known), other, other])
    assert conversation.images == [known, other]
    for image in (replace(known, rows=1, columns=4), replace(other, file=known.file + b"0")):
        with raises("image.equal-keys", f"{image.key:x}"):
            conversation.add_images([image])
    assert conversation.images == [known, other]
