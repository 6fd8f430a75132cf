"""Images over the chat endpoint: data URLs in messages of users and tools, for conversations and external requests."""

import asyncio
import base64
import json
import threading
import tracemalloc
from dataclasses import replace

import aiohttp.streams
import aiohttp.web_request
import pytest
from agent_cases import Scripted, sampling
from endpoint_cases import HAS_OPENAI, USER, Refused, complete, lead, listening, message_of
from image_cases import WatchedFile, png, squares_reader, text_part, url, url_part
from make_squares import CHAT_TEMPLATE, task_tokenizer

from megarl.agents import Conversation
from megarl.agents.endpoint import server
from megarl.agents.frames import encode_prompt
from megarl.agents.types import LARGEST_BODY
from megarl.base.image_files import MAX_BYTES
from megarl.base.image_tokens import image_key
from megarl.data.images import IMAGES

ROW = [{"role": "user", "content": [{"type": "image"}, text_part("How many squares?")]}]


@pytest.fixture(scope="module")
def tokenizer():
    return task_tokenizer()


@pytest.fixture(scope="module")
def reader(tmp_path_factory, tokenizer):
    return squares_reader(tmp_path_factory.mktemp("processor"), tokenizer)


@pytest.fixture(scope="module")
def endpoint(tokenizer, reader):
    with listening(tokenizer, reader=reader) as endpoint:
        yield endpoint


@pytest.fixture
def conversation(tokenizer, reader):
    image = reader.processor.read(png(10), "prompt")
    ids = encode_prompt(tokenizer, ROW, images=[image], image_token=reader.token)
    fields = {"key": "k", "agent_name": "external_agent", "image_reader": reader}
    return Conversation(ROW, sampling(), ids, facts={IMAGES: (image,)}, images=[image], **fields)


def answer(library, task, messages):
    """Complete a conversation with a client; return the response's message."""
    if library == "httpx":
        return message_of(complete(task, messages))
    from openai import OpenAI

    api = OpenAI(base_url=task.base_url, api_key=task.api_key)
    return api.chat.completions.create(model=task.model, messages=messages).choices[0].message.model_dump()


@pytest.mark.parametrize("library", ["httpx", *(["openai"] if HAS_OPENAI else [])])
def test_an_agent_sees_the_rows_image_and_shows_others(endpoint, tokenizer, conversation, library):
    script = Scripted(tokenizer, ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"])

    def agent(task):
        (shown, question) = task.messages[0]["content"]
        assert base64.b64decode(shown["image_url"]["url"].split(",")[1]) == png(10)
        assert question == text_part("How many squares?")
        history = list(task.messages)
        for data, role in ((png(200), "user"), (png(99, (112, 56)), "tool")):
            history.append(answer(library, task, history))
            shown = {"role": role, "content": [text_part("see"), url_part(url(data))], "tool_call_id": "x"}
            history.append({**shown} if role == "tool" else {k: shown[k] for k in ("role", "content")})
        return {"text": answer(library, task, history)["content"]}

    (trajectory,) = lead(endpoint, script, agent, [conversation])
    assert trajectory.error is None and trajectory.fields["agent_result"] == {"text": "3"}
    assert list(trajectory.prompt_ids) == list(conversation.prompt_ids)
    assert trajectory.metrics["branches_dropped"] == 0 and trajectory.num_turns == 6
    assert [(image.data, image.rows, image.columns) for image in trajectory.images] == [
        (png(200), 2, 2),
        (png(99, (112, 56)), 2, 4),
    ]
    contexts = [ids for ids, *_ in script.calls]
    assert contexts[2][: len(contexts[1])] == contexts[1] and contexts[1][: len(contexts[0])] == contexts[0]
    shown = [number for image in trajectory.images for number in image.token_ids]
    assert [number for number in trajectory.response_ids if number < 0] == shown
    generated = {i for i, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if mask}
    assert min(generated) >= 0 and sum(trajectory.response_mask) == 6


def test_a_stored_file_is_read_once_and_in_a_thread(endpoint, tokenizer, conversation):
    file = WatchedFile(png(10))
    stored = replace(conversation, facts={IMAGES: (replace(conversation.facts[IMAGES][0], file=file),)})

    def agent(task):
        complete(task, task.messages)

    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["1<|im_end|>"]), agent, [stored])
    assert trajectory.error is None and trajectory.prompt_ids == list(conversation.prompt_ids)
    (reader,) = file.readers

    async def thread():
        return threading.get_ident()

    assert reader != endpoint.loop.run(thread())


class HugeFile(WatchedFile):
    def __len__(self):
        return MAX_BYTES


def test_images_that_no_request_can_contain_are_refused_by_name(endpoint, tokenizer, conversation):
    image = replace(conversation.images[0], file=HugeFile(png(10)))

    def talk(images):
        row = [{"role": "user", "content": [{"type": "image"}] * images}]
        return replace(conversation, messages=row, facts={IMAGES: (image,) * images})

    script = Scripted(tokenizer, ["1<|im_end|>"])
    one, two = lead(endpoint, script, lambda task: complete(task, USER) and None, [talk(1), talk(2)])
    assert one.error is None
    assert str(2 * MAX_BYTES * 4 // 3) in two.error and str(LARGEST_BODY) in two.error


def test_another_image_in_the_history_begins_a_branch(endpoint, tokenizer, conversation):
    script = Scripted(tokenizer, ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"])

    def agent(task):
        first = {"role": "user", "content": [url_part(url(png(1))), text_part("?")]}
        reply = message_of(complete(task, [first]))
        for shade in (1, 2):
            changed = {"role": "user", "content": [url_part(url(png(shade))), text_part("?")]}
            complete(task, [changed, reply, {"role": "user", "content": "more"}])

    (trajectory,) = lead(endpoint, script, agent, [conversation])
    assert trajectory.metrics["branches_dropped"] == 1
    first, same, other = (ids for ids, *_ in script.calls)
    assert same[: len(first)] == first and other[: len(first)] != first


PICTURE = url(png(1))
WRONG = {
    "http": ("image.remote", [url_part("https://example.org/a.png")]),
    "file": ("image.remote", [url_part("file:///etc/passwd")]),
    "text url": ("image.remote", [url_part("data:text/plain;base64,aGk=")]),
    "base64": ("image.data-url", [url_part("data:image/png;base64,?")]),
    "no url": ("image.part-type", [{"type": "image_url"}]),
    "damaged": ("image.damaged", [url_part(url(png(1)[:-30]))]),
    "gif": ("image.unknown-format", [url_part(url(b"GIF89a"))]),
    "detail": ("image.part-field", [{"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}]),
    "other type": (None, [{"type": "image", "image": PICTURE}]),
    "too many": ("context_length_exceeded", [url_part(PICTURE)] * 700),
    "too large": ("context_length_exceeded", [url_part(url(png(1, (224, 224)))) for _ in range(20)]),
    "not decoded": ("context_length_exceeded", [url_part(url(png(1, (224, 224))[:-30])) for _ in range(20)]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_images_are_refused_by_name(endpoint, tokenizer, conversation, case):
    code, parts = WRONG[case]
    refusals = []

    def agent(task):
        with pytest.raises(Refused) as refused:
            complete(task, [*USER, {"role": "user", "content": [text_part("see"), *parts]}])
        refusals.append(refused.value)
        complete(task, USER)

    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["1<|im_end|>"]), agent, [conversation])
    assert trajectory.error is None and not trajectory.images
    assert refusals[0].status == 400 and refusals[0].error["code"] == code
    text = refusals[0].error["message"]
    assert code == "context_length_exceeded" or "messages.1.content.1" in text


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_users_and_tools_show_images(endpoint, tokenizer, conversation, role):
    def agent(task):
        with pytest.raises(Refused, match="of a user or a tool"):
            complete(task, [{"role": role, "content": [url_part(PICTURE)]}, *USER])
        complete(task, USER)

    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["1<|im_end|>"]), agent, [conversation])
    assert trajectory.error is None


def test_an_image_without_room_meets_the_limit(endpoint, tokenizer, conversation):
    def agent(task):
        reply = message_of(complete(task, task.messages))
        large = {"role": "user", "content": [url_part(url(png(3, (224, 224))))]}
        complete(task, [*task.messages, reply, large])

    short = replace(conversation, params=sampling(max_new_tokens=40))
    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["1<|im_end|>"]), agent, [short])
    assert trajectory.error is None and trajectory.finish_reason == "length" and not trajectory.images


def test_a_policy_of_text_refuses_images(tokenizer):
    def agent(task):
        with pytest.raises(Refused, match="reads text alone") as refused:
            complete(task, [{"role": "user", "content": [url_part(PICTURE)]}])
        assert (refused.value.status, refused.value.error["code"]) == (400, "image.text-model")
        complete(task, USER)

    with listening(tokenizer) as endpoint:
        (trajectory,) = lead(endpoint, Scripted(tokenizer, ["1<|im_end|>"]), agent)
    assert trajectory.error is None


def test_a_template_without_images_is_named(reader):
    tokenizer = task_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|image_pad|>", "")
    with listening(tokenizer, reader=reader) as endpoint, pytest.raises(Refused) as refused:
        complete(endpoint, [{"role": "user", "content": [url_part(PICTURE)]}])
    assert (refused.value.status, refused.value.error["code"]) == (400, "image.template-count")


def test_another_image_with_a_known_key_is_refused(endpoint, tokenizer, conversation):
    other = replace(conversation.images[0], key=image_key(png(1)), file=b"another")

    def agent(task):
        with pytest.raises(Refused) as refused:
            complete(task, [{"role": "user", "content": [url_part(PICTURE)]}])
        assert (refused.value.status, refused.value.error["code"]) == (400, "image.equal-keys")
        complete(task, USER)

    talk = replace(conversation, images=[*conversation.images, other])
    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["1<|im_end|>"]), agent, [talk])
    assert trajectory.error is None


def test_external_requests_have_their_images(endpoint, tokenizer, reader):
    seen = []

    class Recording(Scripted):
        async def __call__(self, prompt_ids, params, *, seed, key, images=()):
            seen.append((list(prompt_ids), list(images)))
            return await super().__call__(prompt_ids, params, seed=seed, key=key)

    async def phase():
        async with endpoint.serving(Recording(tokenizer, ["1<|im_end|>"] * 2)):
            messages = [{"role": "user", "content": [url_part(url(png(7))), text_part("?")]}]
            return await asyncio.to_thread(complete, endpoint, messages, return_token_ids=True, n=2)

    body = endpoint.loop.run(phase())
    image = reader.processor.read(png(7), "picture")
    assert [images for _, images in seen] == [[image]] * 2
    ids = seen[0][0]
    assert [number for number in ids if number < 0] == image.token_ids
    assert body["prompt_token_ids"] == [reader.token if number < 0 else number for number in ids]
    assert body["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("in_conversation", [True, False])
def test_bodies_and_files_of_requests_are_freed_before_the_response(endpoint, tokenizer, conversation, in_conversation):
    """An external request needs its file; a conversation already has the image of its row."""
    size, held = 4 << 20, []
    files = 0 if in_conversation else size
    data = png(10) if in_conversation else png(7)
    data += bytes(size - len(data))
    image = replace(conversation.images[0], file=data, key=image_key(data))
    ids = [*image.token_ids, 5]
    talk = replace(conversation, prompt_ids=ids, facts={IMAGES: (image,)}, images=[image])
    messages = [{"role": "user", "content": [url_part(url(data)), text_part("How many squares?")]}]
    readers = [module.__file__ for module in (base64, json.decoder, aiohttp.streams, aiohttp.web_request, server)]

    class Measuring(Scripted):
        async def __call__(self, prompt_ids, params, *, seed, key, images=()):
            for _ in range(100):  # the thread that has parsed the body may still have it for a moment
                snapshot = tracemalloc.take_snapshot()
                traces = snapshot.filter_traces([tracemalloc.Filter(True, file) for file in readers])
                held.append(sum(trace.size for trace in traces.traces))
                if held[-1] < files + (1 << 20):
                    break
                await asyncio.sleep(0.05)
            return await super().__call__(prompt_ids, params, seed=seed, key=key)

    script = Measuring(tokenizer, ["1<|im_end|>"])

    async def phase():
        async with endpoint.serving(script):
            return await asyncio.to_thread(complete, endpoint, messages)

    tracemalloc.start()
    try:
        if in_conversation:
            (trajectory,) = lead(endpoint, script, lambda task: complete(task, messages) and None, [talk])
            assert trajectory.error is None and trajectory.prompt_ids == ids
        else:
            endpoint.loop.run(phase())
    finally:
        tracemalloc.stop()
    assert files <= held[-1] < files + (1 << 20)
