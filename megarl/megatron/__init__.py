"""Everything that touches Megatron-Core: process groups, models, forward and backward over packed micro-batches,
weights.

"""

from megarl.megatron.runtime.process_groups import Runtime, init_runtime, shutdown_runtime  # isort: skip  (quiets Megatron's imports)
from megarl.megatron.engine.megatron_engine import LossFunction, MegatronEngine
from megarl.megatron.engine.optimizer import OptimizerOptions, StepResult, learning_rate
from megarl.megatron.engine.options import MegatronOptions, OverlapOptions, RecomputeOptions
from megarl.megatron.layers.outputs import DEFAULT_OUTPUTS, OutputOptions, PolicyOutputs, ValueOutputs
from megarl.megatron.layers.packed import PackedMicroBatch

__all__ = [
    "DEFAULT_OUTPUTS",
    "LossFunction",
    "MegatronEngine",
    "MegatronOptions",
    "OptimizerOptions",
    "OutputOptions",
    "OverlapOptions",
    "PackedMicroBatch",
    "PolicyOutputs",
    "RecomputeOptions",
    "Runtime",
    "StepResult",
    "ValueOutputs",
    "init_runtime",
    "learning_rate",
    "shutdown_runtime",
]
