"""A custom agent loop with images in later turns: the policy names a quarter of a picture, sees it larger, and answers.

megarl train --config-name zoom actor_rollout_ref.rollout.agent.default_agent_loop=examples/zoom_agent.py:ZoomAgent

`bash launch/vision.sh zoom` makes the task before it. The image processor shows the picture of the prompt small. The
loop cuts the named quarter out of the picture's file, at full size, and appends it as an image of the user. The reward
is 1 if the answer after it is right.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any, Self

from PIL import Image

from megarl.agents import AgentLoop, Conversation, Generate, Trajectory, Transcript
from megarl.rewards import AGENT_RESULT

QUARTERS = ("1", "2", "3", "4")
"""Names of the quarters: upper left, upper right, lower left, lower right."""


class ZoomAgent(AgentLoop):
    """Shows the quarter that the policy names in its first turn; the second turn is its answer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def create(cls, config: Any, tokenizer: Any, **options: Any) -> Self:
        """Build the loop once per run."""
        return cls(tokenizer, **options)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Lead one conversation; without a quarter's name there is no second turn, and no point."""
        transcript = Transcript(conversation)
        params = replace(conversation.params, max_new_tokens=2)  # a digit and the end of the turn
        turn = await transcript.generate(generate, params)
        name = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        if name not in QUARTERS:
            return transcript.end("stop", {"zoomed": 0.0}, {AGENT_RESULT: {"score": 0.0}})
        image = conversation.images[0]
        crop = await asyncio.to_thread(lambda: quarter(image.data, QUARTERS.index(name)))  # reads and decodes the file
        message = {"role": "user", "content": [{"type": "image", "image": crop}]}
        if not await transcript.observe_messages(self.tokenizer, [message]):  # no room for the picture and an answer
            return transcript.end("length", {"zoomed": 0.0}, {AGENT_RESULT: {"score": 0.0}})
        turn = await transcript.generate(generate, params)
        answer = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        score = float(answer == conversation.facts["reward_model"]["ground_truth"])
        return transcript.end(turn.finish_reason, {"zoomed": 1.0}, {AGENT_RESULT: {"score": score}})


def quarter(file: bytes, number: int) -> Image.Image:
    """Cut a quarter out of an encoded picture, at full size."""
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    row, column = divmod(number, 2)
    width, height = picture.width // 2, picture.height // 2
    return picture.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
