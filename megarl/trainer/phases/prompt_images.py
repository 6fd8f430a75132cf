"""Limits of a job's prompts with images, and the columns that must be empty; imports no torch."""

from __future__ import annotations

from megarl.config.schema.jobs import GenerationJobConfig
from megarl.data.rows.schema import MEDIA
from megarl.rollout.image_reader import image_reader


def longest_with_images(config: GenerationJobConfig) -> int:
    """Return the most tokens of a sequence whose prompt may have images; 0 if the policy reads none."""
    return 0 if image_reader(config) is None else config.data.max_prompt_length + config.data.max_response_length


def unread_columns(config: GenerationJobConfig) -> tuple[str, ...]:
    """Return the columns of images, videos and sounds that the job does not read, so that they must be empty."""
    reader, keys = image_reader(config), (config.data.image_key, config.data.video_key)
    return tuple(dict.fromkeys(name for name in (*MEDIA, *keys) if reader is None or name != reader.key))
