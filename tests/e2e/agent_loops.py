"""Agent loops for end-to-end runs: a search result, or images, between turns."""

import asyncio
import io
from dataclasses import replace

from PIL import Image

from megarl.agents import AgentLoop, Transcript
from megarl.agents.retrieval_client import RetrievalClient, RetrievalOptions
from megarl.agents.search_agent import format_hits, information_turn


class SearchOnce(AgentLoop):
    def __init__(self, tokenizer, client):
        self.tokenizer, self.client = tokenizer, client

    @classmethod
    def create(cls, config, tokenizer, **options):
        search = config.actor_rollout_ref.rollout.multi_turn.search
        return cls(tokenizer, RetrievalClient(RetrievalOptions(search.url, search.topk, retries=0)))

    async def run(self, conversation, generate):
        transcript = Transcript(conversation)
        question = conversation.messages[-1]["content"]
        if conversation.facts["extra_info"]["terms"][0] % 5 == 0:
            raise ValueError("simulated agent failure")
        await transcript.generate(generate, conversation.params.__class__(max_new_tokens=3))
        observation = information_turn(format_hits(await self.client.search(question)))
        if not transcript.observe(self.tokenizer(observation, add_special_tokens=False)["input_ids"]):
            return transcript.end("length")
        turn = await transcript.generate(generate)
        return transcript.end(turn.finish_reason, {"turns": 1.0})


class Crops(AgentLoop):
    """Shows two crops of the prompt's picture, by the last tokens of the turns before them."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def create(cls, config, tokenizer, **options):
        return cls(tokenizer)

    async def run(self, conversation, generate):
        transcript, params = Transcript(conversation), replace(conversation.params, max_new_tokens=3)
        for _ in range(2):
            turn = await transcript.generate(generate, params)
            crop = await asyncio.to_thread(self.crop, conversation.images[0], turn.token_ids[-1])
            if not await transcript.observe_messages(
                self.tokenizer, [{"role": "tool", "content": [{"type": "image", "image": crop}]}]
            ):
                return transcript.end("length")
        turn = await transcript.generate(generate, params)
        return transcript.end(turn.finish_reason)

    def crop(self, image, token):
        picture = Image.open(io.BytesIO(image.data))
        left, top = (4 * (token // divisor % 4) for divisor in (1, 4))
        return picture.crop((left, top, left + 40, top + 40)).resize((56, 56))
