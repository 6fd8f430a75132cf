"""An agent loop for end-to-end runs: a turn, a search result, and a second turn."""

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
