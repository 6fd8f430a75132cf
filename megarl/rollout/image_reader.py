"""The reader of images for a job's policy, in prompts and in later turns; imports no torch."""

from __future__ import annotations

from megarl.base.errors import ConfigError
from megarl.base.image_files import ImageProcessor
from megarl.config.schema.jobs import GenerationJobConfig, TrainConfig
from megarl.data.images import ImageReader
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
