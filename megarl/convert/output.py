"""Output of a conversion: its files, exact to the byte before anything is written, and the parallel copy into them."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.base.checkpoint_files import INDEX
from megarl.base.errors import CheckpointError
from megarl.base.version import __version__
from megarl.convert.source import (
    DTYPES,
    SCORE,
    STATE_FILE,
    STATE_FORMAT,
    WEIGHT,
    CheckpointSource,
    StoredAdapters,
    by_file,
    stacked_views,
)
from megarl.convert.stored import Files, Scratch, TensorView, locate_tensor
from megarl.models import ParallelLayout, WeightMap
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE, StackedPart, name_in_file, stacked_parts
from megarl.models.hf_writer import exported_config, needs_head_bias
from megarl.models.peft_folder import CONFIG_FILE, WEIGHTS_FILE, peft_config, peft_name


@dataclass(frozen=True)
class Selection:
    """Tensors to write, the dtype of each, and the matching config."""

    tensors: Mapping[str, TensorView]
    dtypes: Mapping[str, torch.dtype]
    config: Mapping[str, Any]
    float32: Collection[str] = ()  # tensors that the model keeps in float32 with every weight dtype; never trained
    parts: Mapping[str, StackedPart] = field(default_factory=dict)  # experts in the tensors of a Hugging Face file
    carried: Mapping[str, TensorView] = field(default_factory=dict)  # of a Hugging Face folder, in their own dtype
    initial: str | None = None  # folder of the initial model, for a role checkpoint
    name_in_file: Callable[[str], str] = str  # name in a Hugging Face file, by that in the weight map

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        return _most_common(self.tensors, self.dtypes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their output dtypes."""
        return sum(math.prod(view.shape) * self.dtypes[name].itemsize for name, view in self.tensors.items())


def select(source: CheckpointSource, dtype: torch.dtype | None = None, keep_value_head: bool = True) -> Selection:
    """Select the tensors of an output.

    Args:
        dtype: dtype of the weights; None keeps the dtype of each tensor. Weights that the model keeps in float32 keep
            the dtype of the source.
        keep_value_head: whether to write the scalar head, as a token-classification model if the family has one, as
            critics of other frameworks are; otherwise the head is removed.

    Raises:
        CheckpointError: no tensors are left.
    """
    tensors = dict(source.tensors)
    if not keep_value_head:
        tensors = {name: view for name, view in tensors.items() if name not in SCORE}
    if not tensors:
        raise CheckpointError(f"{source.path} holds no tensors", code="convert.no-tensors")
    float32 = WeightMap(source.config).is_float32
    dtypes = {n: view.dtype if float32(n) else dtype or view.dtype for n, view in tensors.items()}
    config = exported_config(source.config, [*tensors, *source.carried], _most_common(tensors, dtypes))
    if SCORE[0] in tensors and needs_head_bias(config) and SCORE[1] not in tensors:
        tensors[SCORE[1]] = TensorView(SCORE[1], (1,), tensors[SCORE[0]].dtype, ())
        dtypes[SCORE[1]] = dtypes[SCORE[0]]
    initial, parts = str(source.path.absolute()), stacked_parts(source.config)
    exact, in_file = frozenset(filter(float32, tensors)), partial(name_in_file, source.config)
    return Selection(tensors, dtypes, config, exact, parts, source.carried, initial, in_file)


def _most_common(tensors: Mapping[str, TensorView], dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    count: Counter[torch.dtype] = Counter()
    for name, view in tensors.items():
        count[dtypes[name]] += math.prod(view.shape)
    return count.most_common(1)[0][0]


BAND_BYTES = 16 << 20
"""Maximum bytes read and written at once; a worker needs memory for a few bands, independent of tensor sizes."""
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Band(NamedTuple):
    """Rows ``[first, last)`` of a tensor in its output dtype, at a byte offset of a file."""

    offset: int
    view: TensorView
    first: int
    last: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return (self.last - self.first) * math.prod(self.view.shape[1:]) * self.dtype.itemsize


@dataclass
class FilePlan:
    """A large file: its bands and the fixed bytes around them."""

    name: str
    size: int = 0
    bands: list[Band] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class OutputPlan:
    """All files of an output; the small files are written last and complete it."""

    files: list[FilePlan]
    small: dict[str, bytes]
    companions: str  # subfolder for the tokenizer and other small model files; empty = the output itself

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len({band.view.name for file in self.files for band in file.bands})

    @property
    def nbytes(self) -> int:
        """Bytes of the large files."""
        return sum(file.size for file in self.files)


def bands_of(view: TensorView, dtype: torch.dtype, offset: int = 0) -> Iterator[Band]:
    """Split a tensor into bands of at most :data:`BAND_BYTES` or one row, in sequence from ``offset``."""
    row = max(1, math.prod(view.shape[1:]) * max(dtype.itemsize, view.dtype.itemsize))
    height = max(1, BAND_BYTES // row)
    for first in range(0, view.shape[0], height):
        band = Band(offset, view, first, min(first + height, view.shape[0]), dtype)
        yield band
        offset += band.nbytes


# ---- Hugging Face


def plan_hugging_face(selection: Selection, max_shard_bytes: int) -> OutputPlan:
    """Plan a model folder: safetensors shards (a larger tensor is alone), an index for several, the config."""
    carried, in_file = selection.carried, selection.name_in_file
    tensors = {**stacked_views(selection.tensors, selection.parts), **carried}
    dtypes = by_file(selection.dtypes, selection.parts) | {name: view.dtype for name, view in carried.items()}
    selection = replace(
        selection,
        tensors={in_file(name): view for name, view in tensors.items()},
        dtypes={in_file(name): dtype for name, dtype in dtypes.items()},
    )
    shards = _shards(selection, max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
                                                    for n in range(len(shards))]  # fmt: skip
    files = [_safetensors(name, shard, selection) for name, shard in zip(names, shards, strict=True)]
    small = {}
    if len(shards) > 1:
        placed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        small[INDEX_FILE] = _json({"metadata": {"total_size": selection.nbytes}, "weight_map": placed})
    return OutputPlan(files, {**small, "config.json": _json(selection.config)}, "")


# ---- adapters in peft's format


def plan_adapters(adapters: StoredAdapters, dtype: torch.dtype | None) -> OutputPlan:
    """Plan a folder in peft's format: config and one file of tensors, each in its dtype if ``dtype`` is None."""
    tensors = {peft_name(adapters.map.model, name): view for name, view in adapters.views.items()}
    selection = Selection(tensors, {name: dtype or view.dtype for name, view in tensors.items()}, {})
    config = peft_config(adapters.map, str(adapters.base.absolute()))
    return OutputPlan([_safetensors(WEIGHTS_FILE, list(tensors), selection)], {CONFIG_FILE: _json(config)}, "")


def _safetensors(name: str, tensors: list[str], selection: Selection) -> FilePlan:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end_offset = 0
    for tensor in tensors:
        view, dtype = selection.tensors[tensor], selection.dtypes[tensor]
        stop = end_offset + math.prod(view.shape) * dtype.itemsize
        header[tensor] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(view.shape),
            "data_offsets": [end_offset, stop],
        }
        end_offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # elements start at a multiple of 8 bytes
    start = 8 + len(text)
    plan = FilePlan(name, start + end_offset, fixed=[(0, struct.pack("<Q", len(text)) + text)])
    for tensor in tensors:
        bands = list(bands_of(selection.tensors[tensor], selection.dtypes[tensor], start))
        plan.bands += bands
        start = bands[-1].offset + bands[-1].nbytes
    return plan


# ---- megarl role


def plan_role(selection: Selection, max_shard_bytes: int) -> OutputPlan:
    """Plan a role checkpoint with weights only, in the format of :mod:`megarl.megatron.checkpoint.sharded`.

    Raises:
        CheckpointError: the tensors have several dtypes, besides weights that the model keeps in float32.
    """
    trained = {dtype for name, dtype in selection.dtypes.items() if name not in selection.float32}
    mixed = trained - {selection.dtype, torch.float32}
    if mixed:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in {*mixed, selection.dtype}))
        text = f"the weights have several dtypes ({names}): choose one with --dtype"
        raise CheckpointError(text, code="convert.mixed-dtypes")
    index = Metadata({}, storage_data={}, storage_meta=StorageMeta())
    files: list[FilePlan] = []
    for name, view in selection.tensors.items():
        dtype, chunks = selection.dtypes[name], []
        for band in bands_of(view, dtype):
            before, after = _archive(dtype, (band.last - band.first, *view.shape[1:]))
            length = len(before) + band.nbytes + len(after)
            if not files or files[-1].size + length > max(max_shard_bytes, length):
                files.append(FilePlan(f"__0_{len(files)}.distcp"))
            file, start = files[-1], (band.first, *(0 for _ in view.shape[1:]))
            data = file.size + len(before)
            file.bands.append(band._replace(offset=data))
            file.fixed += [(file.size, before), (data + band.nbytes, after)]
            chunks.append(
                ChunkStorageMetadata(torch.Size(start), torch.Size((band.last - band.first, *view.shape[1:])))
            )
            place = _StorageInfo(file.name, file.size, length)
            index.storage_data[MetadataIndex(WEIGHT + name, torch.Size(start))] = place
            file.size += length
        entry = TensorStorageMetadata(TensorProperties(dtype), torch.Size(view.shape), chunks)
        index.state_dict_metadata[WEIGHT + name] = entry
    state = {
        "format": STATE_FORMAT,
        "dtype": str(selection.dtype).removeprefix("torch."),
        "steps": None,
        "layout": ParallelLayout()._asdict(),
        "device": "cpu",
        "skipped_in_a_row": 0,
        "contents": ["model"],
        "initial": selection.initial,
        "megarl_version": __version__,
    }
    small = {"huggingface/config.json": _json(selection.config), STATE_FILE: _json(state), INDEX: pickle.dumps(index)}
    return OutputPlan(files, small, "huggingface")


@lru_cache(maxsize=64)
def _archive(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` writes before and after the elements of a tensor."""
    stream, checksums = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the elements are not written yet; torch does not check them on load
    try:
        torch.save(torch.zeros(shape, dtype=dtype), stream)
    finally:
        torch.serialization.set_crc32_options(checksums)
    archive = stream.getvalue()
    stream.seek(0)
    begin = locate_tensor(stream).offset
    return archive[:begin], archive[begin + math.prod(shape) * dtype.itemsize :]


def _shards(selection: Selection, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = []
    used = 0
    for name, view in selection.tensors.items():
        nbytes = math.prod(view.shape) * selection.dtypes[name].itemsize
        if not shards or used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        used += nbytes
        shards[-1].append(name)
    return shards


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


_T = TypeVar("_T")
Report = Callable[[int], None]  # called with the number of bytes done, from any thread


def in_parallel(work: Callable[[_T, Scratch], None], items: Iterable[_T], workers: int) -> None:
    """Call ``work`` for every item, started in order; the first error stops further items and is raised.

    ``work`` receives an item and its worker's scratch memory. Reading, writing and copying release the interpreter
    lock.
    """
    iterator, lock, stop = iter(items), threading.Lock(), threading.Event()

    def loop() -> None:
        scratch = Scratch()
        torch.set_num_threads(1)
        while not stop.is_set():
            with lock:
                item = next(iterator, iterator)
            if item is iterator:
                return
            try:
                work(item, scratch)  # type: ignore[arg-type]  # not the sentinel
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(loop) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()


class _OpenFile:
    """An output file until all its bands are written."""

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self.plan, self._left, self._lock = plan, len(plan.bands), threading.Lock()
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self.descriptor, plan.size)
        for offset, content in plan.fixed:
            _write(self.descriptor, memoryview(content), offset)

    def band_done(self) -> bool:
        """Count a written band; return whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def finish(self) -> None:
        """Flush the file to disk and close it."""
        try:
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


def transfer(
    files: Iterable[FilePlan], folder: Path, workers: int, finished: Callable[[str], None], report: Report
) -> None:
    """Write files.

    Args:
        finished: called with the name of each file that is complete and flushed to disk.
        report: called with the number of bytes written.

    Raises:
        CheckpointError: a part of the source is missing or damaged, or writing failed, for example on a full disk.
    """
    sources = Files()

    def bands() -> Iterator[tuple[_OpenFile, Band]]:
        for plan in files:
            opened = _OpenFile(folder / plan.name, plan)
            for band in plan.bands:
                yield opened, band

    def move(item: tuple[_OpenFile, Band], scratch: Scratch) -> None:
        opened, band = item
        rows = band.view.read(band.first, band.last, band.dtype, sources, scratch)
        _write(opened.descriptor, rows.view(-1).view(torch.uint8).numpy().data, band.offset)
        report(band.nbytes)
        if opened.band_done():
            opened.finish()
            finished(opened.plan.name)

    try:
        with contextlib.closing(sources):
            in_parallel(move, bands(), workers)
    except OSError as error:
        raise CheckpointError(f"writing to {folder} failed: {error}", code="convert.write-failed") from error


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0, show: bool = True) -> Iterator[Report]:
    """Show a progress bar of bytes on a terminal's stderr; yields a function that adds some, from any thread."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda count: bar.advance(task, count)
