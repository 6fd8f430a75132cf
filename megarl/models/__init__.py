"""Model families: Hugging Face configs and the weight map, as data.

Importing this package imports no torch; reading and writing tensors is in :mod:`megarl.models.hf_checkpoint`.
"""

from megarl.models.hf_config import ModelConfig, check_layout, parse_model_config, read_model_config
from megarl.models.hf_folder import ModelFolder, check_model_folder
from megarl.models.layout import ParallelLayout, RankCoordinate
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
