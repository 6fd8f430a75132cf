"""Model families: Hugging Face configs and the weight map, as data.

Importing this package imports no torch; :mod:`megarl.models.hf_checkpoint` and ``hf_writer`` read and write tensors.
"""

from megarl.models.hf_config import check_layout, parse_model_config, read_model_config
from megarl.models.hf_folder import ModelFolder, check_model_folder
from megarl.models.layout import ParallelLayout, RankCoordinate
from megarl.models.model_config import ModelConfig
from megarl.models.registry import known_architectures, register_family
from megarl.models.weight_map import LocalParam, Piece, WeightMap, canonical_name

__all__ = [
    "LocalParam",
    "ModelConfig",
    "ModelFolder",
    "ParallelLayout",
    "Piece",
    "RankCoordinate",
    "WeightMap",
    "canonical_name",
    "check_layout",
    "check_model_folder",
    "known_architectures",
    "parse_model_config",
    "read_model_config",
    "register_family",
]
