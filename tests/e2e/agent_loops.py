"""A loop for end-to-end runs: a policy that knows nothing writes, is told what a search finds, and writes again."""

from megarl.retrieval import RetrievalClient, RetrievalOptions
from megarl.rollout.agents import AgentLoop, Transcript
from megarl.rollout.agents.search_protocol import information, listed


class ToldAnyway(AgentLoop):
    def __init__(self, tokenizer, client):
        self.tokenizer, self.client = tokenizer, client

    @classmethod
    def create(cls, config, tokenizer, **options):
        return cls(tokenizer, RetrievalClient(RetrievalOptions(config.retriever.url, config.retriever.topk, retries=0)))

    async def run(self, conversation, generate):
        transcript = Transcript(conversation)
        question = conversation.messages[-1]["content"]
        if conversation.facts["extra_info"]["terms"][0] % 5 == 0:
            raise ValueError("this one is lost")
        await transcript.generate(generate, conversation.params.__class__(max_new_tokens=3))
        found = information(listed(await self.client.search(question)))
        if not transcript.observe(self.tokenizer(found, add_special_tokens=False)["input_ids"]):
            return transcript.end("length")
        turn = await transcript.generate(generate)
        return transcript.end(turn.finish_reason, {"asked": 1.0})
