"""The environment that SGLang's processes run in."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.rollout.sglang.options import SGLangOptions

SHIM = Path(__file__).parent / "cpu_shim"


def needs_shim(options: SGLangOptions) -> bool:
    """Whether SGLang computes on a CPU and its compiled kernels are not installed."""
    if not options.is_cpu:
        return False
    spec = importlib.util.find_spec("sgl_kernel")
    return spec is None or spec.origin is None or Path(spec.origin).is_relative_to(SHIM)


def environment(options: SGLangOptions) -> dict[str, str]:
    """Variables that SGLang's processes need, besides those that this one has."""
    # Requests may fill the model's context to the last token, of which SGLang keeps two for itself.
    variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if options.is_cpu:
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = _cores(options.tensor_parallel_size)
        # Compiling the few lines that SGLang marks for it takes longer than a test run.
        variables["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    if needs_shim(options):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH", "")]))
    return variables


def _cores(ranks: int) -> str:
    """This process's cores, dealt out to the ranks; ranks share cores where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::ranks] or [cores[rank % len(cores)]])) for rank in range(ranks))


@contextlib.contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables in this process while SGLang's processes are started from it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def load_shim() -> None:
    """Makes the stand-ins of the shim importable in this process, into which SGLang's front end is imported."""
    if str(SHIM) in sys.path:
        return
    # At the end: a package of that name that is really installed comes first.
    sys.path.append(str(SHIM))
    spec = importlib.util.spec_from_file_location("megarl_sglang_cpu_shim", SHIM / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
