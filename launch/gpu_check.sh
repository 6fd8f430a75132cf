#!/usr/bin/env bash
# Runs megarl's parts on the GPU of this machine, and compares with transformers and `megarl plan`: parity, speed, engines,
# weight sync, offload, colocated jobs, FP8 (docs/how_to/gpu.md). Each stage takes less than eight minutes. The same
# command continues after an interruption. Without a GPU, the stages run on the CPU with tiny models.
#
#   bash launch/gpu_check.sh                              all stages; reports in gpu_check/
#   bash launch/gpu_check.sh --stages parity,speed        some stages
#   PYTHON=/opt/torch/bin/python bash launch/gpu_check.sh the interpreter with the machine's torch (default: python3)
#
# Installs nothing and needs no network: a missing package is a row of the table.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m megarl.ops.acceptance.command "$@"
