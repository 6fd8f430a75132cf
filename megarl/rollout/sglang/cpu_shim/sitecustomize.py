"""Patches SGLang to run without a GPU and without its compiled kernels; Python imports this module at its start.

The engine adds this folder to the search path of SGLang's processes on such a machine only. It also contains
``sgl_kernel``, a substitute for the kernels. Some modules are patched when they are imported, and one is replaced:

- ``sglang.srt.server_args``: seeds per request need SGLang's deterministic mode, which accepts only attention backends
  of GPUs. Plain torch attention computes each sequence independently, so it is added.
- ``sglang.srt.batch_invariant_ops``: that mode replaces matrix products by Triton's, which do not exist on a CPU.
- ``sglang.kernels.ops.sampling.murmur_hash``: draws by seeds with a Triton kernel, before 0.5.21 on a CPU too.
- ``sglang.srt.utils.weight_checker``: waits for a CUDA device in some versions.
- ``sglang.srt.state_capturer.base``: registers the host memory of recorded experts with CUDA.
- ``sglang.srt.entrypoints.engine``: starts processes that import SGLang for 6 s each; they become forks of one process.
- ``torchvision``, unless installed: SGLang imports it for vision models. Its usual build is for CUDA, fails to load
  with a CPU build of torch, and then prevents transformers' models from loading too.
- ``transformers.models.auto.video_processing_auto``: processors of videos need it; those of images do not.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def _admit_torch_attention(module: ModuleType) -> None:
    for name in ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"):
        choices = getattr(module, name, None)
        if choices is not None and "torch_native" not in choices:
            choices.append("torch_native")


def _keep_torch_products(module: Any) -> None:
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _hash_without_triton(module: Any) -> None:
    module.murmur_hash32 = importlib.import_module("sgl_kernel").murmur_hash32_cpu


def _wait_for_no_device(module: Any) -> None:
    module.torch.cuda.synchronize = lambda *args, **kwargs: None


def _keep_experts_in_plain_memory(module: Any) -> None:
    def allocate(dims: Sequence[int], dtype: Any, **options: Any) -> Any:
        return module.torch.empty(dims, dtype=dtype)

    module.ALLOC_MEMORY_FUNCS = {"cpu": allocate}


def _fork_processes(module: Any) -> None:
    module.mp = importlib.import_module("megarl.rollout.sglang.forks").ForkingMultiprocessing("multiprocessing")


def _note_absence(module: Any) -> None:
    """Let transformers look for torchvision before the substitute exists; it caches the result."""
    sys.meta_path.remove(_ABSENT)
    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        if hasattr(module, name):
            getattr(module, name)()
    sys.meta_path.append(_ABSENT)


class _NoVideos(dict[str, Any]):
    """The part for videos of a model's processor."""

    model_input_names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return no settings."""
        return {}


def _process_no_videos(module: Any) -> None:
    if importlib.machinery.PathFinder.find_spec("torchvision") is not None:
        return
    mixin = importlib.import_module("transformers.processing_utils").ProcessorMixin
    check = mixin.check_argument_for_proper_class

    def accept(self: Any, name: str, argument: Any) -> Any:
        return _NoVideos if isinstance(argument, _NoVideos) else check(self, name, argument)

    mixin.check_argument_for_proper_class = accept
    module.AutoVideoProcessor.from_pretrained = lambda *args, **kwargs: _NoVideos()


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.server_args": _admit_torch_attention,
    "sglang.srt.batch_invariant_ops": _keep_torch_products,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_without_triton,
    "sglang.srt.utils.weight_checker": _wait_for_no_device,
    "sglang.srt.state_capturer.base": _keep_experts_in_plain_memory,
    "sglang.srt.entrypoints.engine": _fork_processes,
    "transformers.utils.import_utils": _note_absence,
    "transformers.models.auto.video_processing_auto": _process_no_videos,
}


class _PatchingLoader(importlib.abc.Loader):
    """Patches a module after its loader has loaded it."""

    def __init__(self, loader: importlib.abc.Loader, complete: Callable[[ModuleType], None]) -> None:
        self._loader, self._complete = loader, complete

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._complete(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to patch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, AFTER[name])
        return spec


class _Absent(type):
    """Metaclass of any class of an absent module: it has every attribute, and none does anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


class _AbsentPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last finder: creates ``torchvision`` and its modules if they are not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(_Absent("torchvision", (), {}), name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        return


def _run_hidden_sitecustomize() -> None:
    """Run the ``sitecustomize`` that this module hides, if any."""
    other_paths = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", other_paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_ABSENT = _AbsentPackage()
sys.meta_path.insert(0, _Finder())
sys.meta_path.append(_ABSENT)
for _name in AFTER.keys() & sys.modules.keys():
    AFTER[_name](sys.modules[_name])
if __name__ == "sitecustomize":
    _run_hidden_sitecustomize()
