"""Images in a job's prompts: their reader, and the columns that must be empty; imports no torch."""

from __future__ import annotations

from megarl.base.errors import ConfigError
from megarl.base.image_files import ImageProcessor
from megarl.config.schema.jobs import GenerationJobConfig, TrainConfig
from megarl.data.images import ImageReader
from megarl.data.rows.schema import MEDIA
from megarl.models import read_model_config


def image_reader(config: GenerationJobConfig) -> ImageReader | None:
    """Return the reader of images for the policy; None for a model of text, and with teachers on servers.

    Raises:
        ConfigError: a key about images does not fit the model.
    """
    data, path = config.data, config.actor_rollout_ref.model.path
    vision = read_model_config(path).vision
    teachers = config.distillation if isinstance(config, TrainConfig) and config.distillation.enabled else None
    has_servers = teachers is not None and len(teachers.local_teachers) < len(teachers.teacher_models)
    if vision is None or has_servers:
        if data.mm_processor_kwargs:
            reader = "a teacher on servers" if vision else f"the model in {path}"
            text = f"data.mm_processor_kwargs={data.mm_processor_kwargs}: {reader} reads no images; remove the key"
            raise ConfigError(text, code="data.reads-no-images")
        return None
    patch = vision.settings.get("patch_size")
    if data.image_patch_size not in (None, patch):
        text = f"data.image_patch_size={data.image_patch_size}: the vision tower in {path} has patches of {patch}; set"
        raise ConfigError(f"{text} that, or null", code="data.image-patch-size")
    return ImageReader(ImageProcessor(path, data.mm_processor_kwargs), vision.image_token, data.image_key)


def longest_with_images(config: GenerationJobConfig) -> int:
    """Return the most tokens of a sequence whose prompt may have images; 0 if the policy reads none."""
    return 0 if image_reader(config) is None else config.data.max_prompt_length + config.data.max_response_length


def unread_columns(config: GenerationJobConfig) -> tuple[str, ...]:
    """Return the columns of images, videos and sounds that the job does not read, so that they must be empty."""
    reader, keys = image_reader(config), (config.data.image_key, config.data.video_key)
    return tuple(dict.fromkeys(name for name in (*MEDIA, *keys) if reader is None or name != reader.key))
