"""Files of images in Ray's object store: written once, read where they are needed, and freed with their prompts."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
from support.expected_errors import raises
from support.node_callers import calls_by_node
from support.object_store import store_bytes, store_stats
from support.waits import wait_until

from megarl.base.errors import WorkerError
from megarl.base.image_tokens import Image
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.stored_chunks import StoredChunk
from megarl.cluster.stored_images import StoredFile, store_images
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.data import DataProto
from megarl.models import ParallelLayout
from tests.cluster.plain_workers import samples

PROMPTS, SAMPLES, BYTES = 8, 4, 200_000
"""Rows of a batch, and the size of the file of each prompt."""


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=2) as session:
        yield session.place([ResourcePool("main", "cpu", [2])])["main"]


@pytest.fixture(scope="module", params=["called by rank", "called by node"])
def group(pool, request):
    with calls_by_node(4) if request.param == "called by node" else nullcontext():
        group = WorkerGroup("echo", "tests.cluster.plain_workers.Echo", {}, ParallelLayout(tp=2, dp=2), pool)
    wait_ready([group])
    yield group
    group.shutdown()


def image(seed, size=BYTES):
    return Image.of(np.random.default_rng(seed).bytes(size), 2, 3)


def batch_of(prompts):
    """A batch with ``SAMPLES`` adjacent rows for each tuple of images."""
    images = DataProto.from_dict({}, {"images": prompts}).repeat(SAMPLES)
    return samples([5, 2] * (len(images) // 2)).union(images)


def digests(batch):
    return [[image.key for image in row] for row in batch.non_tensor_batch["images"]]


def test_a_stored_image_is_the_same_image(pool):
    plain = (image(1, 3), image(2, 5000), image(3, 0))
    stored = store_images(plain)
    assert stored == plain and [one.data for one in stored] == [one.data for one in plain]
    assert [len(one.file) for one in stored] == [3, 5000, 0]
    assert copy.deepcopy(stored)[1].file is stored[1].file, "agent runners copy the facts of a prompt"
    again = store_images(stored)
    assert [one.data for one in again] == [one.data for one in plain]


def test_passes_write_no_file_again(group):
    """Eight prompts with four samples each; every rank reads the files of its rows, in each of three passes."""
    before = store_stats()
    batch = batch_of([store_images([image(number)]) for number in range(PROMPTS)])
    for _ in range(3):
        assert group.view(batch).non_tensor_batch["digests"].tolist() == digests(batch)
    after, files = store_stats(), PROMPTS * BYTES
    assert files <= after.cumulative_created_bytes - before.cumulative_created_bytes < files + BYTES
    assert after.object_store_bytes_used - before.object_store_bytes_used < files + BYTES
    del batch
    wait_until(lambda: store_bytes() < before.object_store_bytes_used + BYTES)


def test_rows_mix_stored_files_and_plain_ones(group):
    """Images of later turns come with the samples; a prompt may have none."""
    first, second = store_images([image(1, 4000), image(2, 500)])
    batch = batch_of([(first, image(3, 700)), (), (image(4, 10), second)])
    assert group.view(batch).non_tensor_batch["digests"].tolist() == digests(batch)


def test_lost_files_are_named(pool):
    group = WorkerGroup("lost", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(), pool)
    wait_ready([group])
    pending = group.submit("sleep", 60.0)
    group.kill(0)
    file = StoredFile(StoredChunk(pending.calls[0].ref), 0, 3)
    with raises("ray.values-lost", "resume from a checkpoint", error=WorkerError):
        file.read()
    group.shutdown()
