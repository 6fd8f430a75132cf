"""Helpers of the agent tests: a tokenizer that merges across turns, scripted and real generators."""

import asyncio
import threading
from contextlib import contextmanager

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.agents.runner import lead_conversation
from megarl.agents.trajectories import report_failures
from megarl.rollout import Completion, Request, SamplingParams

QWEN_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
# Merged tokens across the boundary of two turns: the end of a tag or an answer, with the next character.
ACROSS = [">\n", ">\n\n", "\n\n<", "a\n", "ab"]


def merging_tokenizer():
    """Byte-level tokenizer with merges of the last character of a turn and the first characters of the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*MARKERS, *alphabet])}
    merges = []
    for text in ACROSS:
        word = text.replace("\n", "Ċ")
        for cut in range(1, len(word)):
            if word[: cut + 1] not in vocabulary:
                vocabulary[word[: cut + 1]] = len(vocabulary)
                merges.append((word[:cut], word[cut]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = QWEN_TEMPLATE
    return fast


@contextmanager
def tokenized(tokenizer, threads=None):
    """Yield the lengths of all texts that are tokenized within the block; add their threads to ``threads``."""
    kind, lengths, threads = type(tokenizer), [], set() if threads is None else threads
    encode = kind.__call__

    def counting(self, text, *args, **kwargs):
        if self is tokenizer:
            lengths.append(len(text))
            threads.add(threading.get_ident())
        return encode(self, text, *args, **kwargs)

    kind.__call__ = counting
    try:
        yield lengths
    finally:
        kind.__call__ = encode


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Scripted:
    """Generates scripted texts, one token per character, and records its calls.

    Args:
        tokenizer: encodes the characters.
        turns: texts of the turns, or a function from (prompt text, turn) to a text; an exception is raised.
        pause: seconds per turn.
    """

    def __init__(self, tokenizer, turns, pause=0.0):
        self.tokenizer, self.turns, self.pause = tokenizer, turns, pause
        self.calls = []
        self.at = {}

    async def __call__(self, prompt_ids, params, *, seed, key, images=()):
        turn = self.at[key] = self.at.get(key, -1) + 1
        self.calls.append((list(prompt_ids), params, seed, key))
        await asyncio.sleep(self.pause)
        text = self.turns[turn] if isinstance(self.turns, list) else self.turns(self.tokenizer.decode(prompt_ids), turn)
        if isinstance(text, Exception):
            raise text
        ids = self.spelled(text)[: params.max_new_tokens]
        reason = "stop" if len(ids) == len(self.spelled(text)) else "length"
        return Completion("", ids, [-0.5] * len(ids), reason, turn)

    def spelled(self, text):
        """Token ids of a text, character by character; they differ from the tokenizer's."""
        ids = []
        for part in text.replace("<|im_end|>", "\0").split("\0"):
            ids += [i for char in part for i in ids_of(self.tokenizer, char)] + ids_of(self.tokenizer, "<|im_end|>")
        return ids[:-1]


class EngineGenerate:
    """``Generate`` over a real engine: one thread polls it, conversations wait for their completions."""

    def __init__(self, engine):
        self.engine, self.lock = engine, threading.Lock()
        self.waiting, self.number, self.poller = {}, 0, None

    async def __call__(self, prompt_ids, params, *, seed, key, images=()):
        self.number += 1
        name, future = f"{key}/{self.number}", asyncio.get_running_loop().create_future()
        self.waiting[name] = future
        with self.lock:
            self.engine.submit([Request(name, list(prompt_ids), params, seed)])
        if self.poller is None or self.poller.done():
            self.poller = asyncio.ensure_future(self.poll())
        return await future

    async def poll(self):
        while self.waiting:
            for completion in await asyncio.to_thread(self._poll_once):
                self.waiting.pop(completion.request_id).set_result(completion)

    def _poll_once(self):
        with self.lock:
            return self.engine.poll(0.01)


async def lead_all(conversations, loops, generate):
    """Lead conversations concurrently; return their trajectories in order. Raises if all failed."""
    leading = [lead_conversation(talk, loops[talk.agent_name], generate) for talk in conversations]
    trajectories = await asyncio.gather(*leading)
    report_failures(trajectories)
    return trajectories


def sampling(**fields):
    return SamplingParams(**{"max_new_tokens": 400} | fields)
