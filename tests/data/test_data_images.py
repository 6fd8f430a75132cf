"""Images in data sets: verl's schema, tokens as transformers' processor expands them, and bad input."""

import io
import json
import pickle
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from make_squares import CHAT_TEMPLATE, task_tokenizer
from PIL import Image as pil
from support.expected_errors import raises
from support.squares_task import make_squares_task
from support.vision_models import png
from transformers import AutoImageProcessor, Qwen2_5_VLProcessor

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_spans, with_placeholders
from megarl.data import DataProto, RLHFDataset, check_files
from megarl.data.dataset import CustomCollate, CustomPrompts, sample_rows
from megarl.data.images import ImageReader
from megarl.data.rows import Rows
from megarl.data.shared_prompts import DIGESTS, prompt_digests
from megarl.data.tokenization import PromptEncoder, PromptReader

PICTURE, WIDE, TALL = png(56, 56), png(56, 140, 1), png(112, 84, 2)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="module")
def vision_tokenizer():
    return task_tokenizer()


@pytest.fixture(scope="module")
def image_token(vision_tokenizer):
    return vision_tokenizer.convert_tokens_to_ids("<|image_pad|>")


@pytest.fixture
def reader(task, image_token):
    return ImageReader(ImageProcessor(str(task / "model")), image_token)


@pytest.fixture
def dataset(write, vision_tokenizer, reader, tmp_path):
    """``dataset(rows, images=reader, **arguments)``: of a parquet file, or a JSONL file with ``lines=True``."""

    def build(rows, *, lines=False, **arguments):
        if lines:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            path = write(filled(rows))
        defaults = {"images": reader, "media": ("videos", "video", "image"), "cache_dir": str(tmp_path / "cache")}
        return RLHFDataset(str(path), vision_tokenizer, **{"max_prompt_length": 200, **defaults, **arguments})

    return build


def filled(rows):
    """Rows with the columns of all, as pyarrow takes them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def row(content, images=None, **columns):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    files = {} if images is None else {"images": images}
    return {"prompt": messages, "data_source": "toy", "reward_model": {"ground_truth": "1"}, **files, **columns}


class WithoutVideo(Qwen2_5_VLProcessor):
    """The processor without its video processor, which needs torchvision."""

    def __init__(self, image_processor, tokenizer):
        self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, tokenizer.chat_template
        self.image_token, self.image_token_id = "<|image_pad|>", tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.video_token, self.video_token_id = "<|video_pad|>", None

    def get_attributes(self):
        return ["image_processor", "tokenizer"]


def expanded(task, tokenizer, messages, files):
    processor = WithoutVideo(AutoImageProcessor.from_pretrained(task / "model", backend="pil"), tokenizer)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = [pil.open(io.BytesIO(data)) for data in files]
    return list(processor(text=[text], images=pictures or None)["input_ids"][0])


@pytest.mark.parametrize("files", [[], [PICTURE], [WIDE, TALL], [TALL, PICTURE, TALL]])
def test_ids_are_those_of_the_processor(task, dataset, vision_tokenizer, image_token, files):
    content = "a " + "<image> b".join(["x"] * (len(files) + 1))
    data = dataset([row(content, [{"bytes": file} for file in files] or None)])
    sample = data[0]
    ids = with_placeholders(sample["prompt_ids"], image_token)
    assert ids == expanded(task, vision_tokenizer, sample["raw_prompt"], files)
    assert ids.count(image_token) == sum(image.rows * image.columns for image in sample["images"])
    assert [span.key for span in image_spans(sample["prompt_ids"])] == [image.key for image in sample["images"]]
    assert [image.data for image in sample["images"]] == files


def test_rows_of_text_and_of_images_are_read_together(dataset, image_token):
    data = dataset([row("two words"), row("<image>what?", [{"bytes": PICTURE}])])
    assert data[0]["images"] == () and data[0]["raw_prompt"] == [{"role": "user", "content": "two words"}]
    assert image_token not in data[0]["prompt_ids"] and min(data[0]["prompt_ids"]) >= 0
    assert (data[1]["images"][0].rows, data[1]["images"][0].columns) == (2, 2)
    assert data[1]["raw_prompt"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]


@pytest.mark.parametrize(
    "entry",
    [
        lambda path: {"bytes": PICTURE},
        lambda path: {"bytes": PICTURE, "path": "elsewhere.png"},
        lambda path: {"bytes": None, "path": "pictures/a.png"},
        lambda path: {"path": str(path)},
        lambda path: {"image": {"path": str(path)}},
        lambda path: {"image": PICTURE},
        lambda path: "pictures/a.png",
        lambda path: f"file://{path}",
        lambda path: PICTURE,
    ],
)
def test_forms_of_an_entry(dataset, tmp_path, entry):
    path = tmp_path / "pictures" / "a.png"
    path.parent.mkdir()
    path.write_bytes(PICTURE)
    assert dataset([row("<image>?", [entry(path)])])[0]["images"] == (Image.of(PICTURE, 2, 2),)


def test_parts_of_a_content(dataset, tmp_path):
    (tmp_path / "a.png").write_bytes(WIDE)
    parts = [
        {"type": "text", "text": "first"},
        {"type": "image", "image": "a.png"},
        {"type": "image"},
        {"type": "text", "text": "<image> is text here"},
    ]
    for lines in (False, True):
        files = [{"path": str(tmp_path / "b.png")}]
        (tmp_path / "b.png").write_bytes(TALL)
        data = dataset([row([{"role": "user", "content": parts}], files)], lines=lines)
        assert [image.data for image in data[0]["images"]] == [WIDE, TALL]
        (message,) = data[0]["raw_prompt"]
        assert message["content"] == [parts[0], {"type": "image"}, {"type": "image"}, parts[3]]


def test_images_follow_the_order_of_all_messages(dataset):
    messages = [
        {"role": "user", "content": "<image>one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two<image>"},
    ]
    sample = dataset([row(messages, [{"bytes": WIDE}, {"bytes": TALL}])])[0]
    assert [image.data for image in sample["images"]] == [WIDE, TALL]
    assert [span.key for span in image_spans(sample["prompt_ids"])] == [image.key for image in sample["images"]]


def test_text_of_the_image_token_is_no_image(dataset, vision_tokenizer, image_token):
    sample = dataset([row("say <|image_pad|> <image>", [{"bytes": PICTURE}]), row("say <|image_pad|>")])
    for number, images in ((0, 1), (1, 0)):
        ids = sample[number]["prompt_ids"]
        assert image_token not in ids and len(image_spans(ids)) == images
        assert "<|image_pad|>" in vision_tokenizer.decode(with_placeholders(ids, image_token)).replace(" ", "")


def test_a_template_that_writes_no_image_token_is_refused(dataset, reader, write):
    tokenizer = task_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|image_pad|>", "")
    path = write([row("<image>?", [{"bytes": PICTURE}])])
    with raises("image.template-count", path, "row 0", "0 image tokens", "1 images"):
        RLHFDataset(path, tokenizer, 99, images=reader, media=())


def header(width, height, bits=8, kind=2):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    size = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b""))


def encoded(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


NOISE = pil.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
BAD_IMAGES = {
    "image.missing": "nowhere.png",
    "image.remote": "https://example.com/a.png",
    "image.damaged": encoded(NOISE, "JPEG")[:1500],
    "image.too-many-pixels": header(100_000, 100_000),
    "image.animated": encoded(NOISE, "PNG", save_all=True, append_images=[NOISE.rotate(90)]),
    "image.color-mode": encoded(NOISE.convert("CMYK"), "JPEG"),
    "image.unknown-format": b"no picture",
    "image.processor-refuses": encoded(NOISE.resize((640, 2)), "PNG"),
}


@pytest.mark.parametrize("code", BAD_IMAGES)
def test_bad_image_is_named_at_start(dataset, code):
    bad = BAD_IMAGES[code]
    entry = {"path": bad} if isinstance(bad, str) else {"bytes": bad}
    good = row("<image>?", [{"bytes": PICTURE}])
    with raises(code, "train.parquet, row 1", "column 'images', image 1"):
        dataset([good, row("<image><image>", [{"bytes": PICTURE}, entry])])


def test_pictures_are_decoded_at_start_alone(dataset, monkeypatch):
    decoded = []
    data = dataset([row("<image>?", [{"bytes": file}]) for file in (WIDE, TALL)])
    monkeypatch.setattr("megarl.base.image_files.decode_image", lambda *_: decoded.append(1))
    images = [data[number]["images"][0] for number in (0, 1)]
    assert [(image.data, image.rows, image.columns) for image in images] == [(WIDE, 2, 5), (TALL, 4, 3)] and not decoded


def test_16_bits_and_too_many_bytes_are_refused(dataset, monkeypatch):
    deep = encoded(pil.fromarray(np.zeros((56, 56), np.uint16)), "PNG")
    with raises("image.color-mode", "row 0", "I;16"):
        dataset([row("<image>", [{"bytes": deep}])])
    for kind, mode in ((2, "RGB;16B"), (4, "LA;16B"), (6, "RGBA;16B")):
        with raises("image.color-mode", "row 0", mode):
            dataset([row("<image>", [{"bytes": header(56, 56, 16, kind)}])])
    monkeypatch.setattr("megarl.base.image_files.MAX_BYTES", 100)
    with raises("image.too-many-bytes", "row 0", len(PICTURE), 100):
        dataset([row("<image>", [{"bytes": PICTURE}])])


IMAGE, SYSTEM = {"bytes": PICTURE}, [{"role": "system", "content": "<image>"}, {"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("bad", "code", "values"),
    [
        (row("<image><image>", [IMAGE]), "image.placeholder-count", ("2 placeholders", "1 images", "data.image_key")),
        (row("what?", [IMAGE]), "image.placeholder-count", ("0 placeholders", "1 images")),
        (row("<image>?"), "image.placeholder-count", ("1 placeholders", "0 images")),
        (row(SYSTEM, [IMAGE]), "image.in-system-message", ()),
        (row("<video>?"), "image.video", ("message 0",)),
        (row([{"role": "user", "content": [{"type": "video"}]}]), "image.video", ("message 0",)),
        (row([{"role": "user", "content": [{"type": "audio"}]}]), "image.part-type", ("message 0", "audio")),
        (row([{"role": "user", "content": [{"type": "text", "text": 3}]}]), "image.part-type", ("message 0",)),
        (row("<image>?", [3]), "image.entry-type", ("image 0", "3")),
        (row("<image>?", [{"url": "a.png"}]), "image.entry-type", ("image 0", "url")),
        (row("?", videos=["a.mp4"]), "data.media-column", ("'videos'",)),
        (row("?", image=["a.png"]), "data.media-column", ("'image'", "data.image_key")),
    ],
)
def test_bad_row_is_named_at_start(dataset, bad, code, values):
    with raises(code, "row 1" if code == "data.media-column" else "row 0", *values):
        rows = [row("fine"), bad] if code == "data.media-column" else [bad]
        dataset(rows, lines=True) if IMAGE not in bad.get("images", ()) else dataset(rows)


def test_models_of_text_refuse_images(write, tokenizer, question_rows):
    for change in ({"images": [IMAGE]}, {"images": ["a.png"]}, {"multi_modal_data": {"image": "a.png"}}):
        (name,) = change
        path = write(filled([*question_rows(1), {**question_rows(1)[0], **change}]))
        for read in (
            lambda path: RLHFDataset(path, tokenizer, 99),
            lambda path: check_files(path, ("data_source",), "data.train_files", "prompt"),
        ):
            with raises("data.media-column", path, f"'{name}', row 1"):
                read(path)
    parts = {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}
    with raises("data.column-type", "column 'prompt'"):
        RLHFDataset(write([{**question_rows(1)[0], **parts}]), tokenizer, 99)
    empty = write([{**question_rows(1)[0], "images": []}])
    assert "images" not in RLHFDataset(empty, tokenizer, 99)[0]


def test_another_column_of_images(dataset, reader):
    rows = [row("<image>?", pictures=[IMAGE], images=[])]
    sample = dataset(rows, images=replace(reader, key="pictures"), media=("images",))[0]
    assert sample["images"] == (Image.of(PICTURE, 2, 2),) and "pictures" not in sample
    with raises("data.media-column", "'pictures'", "row 0"):
        dataset(rows, images=reader, media=("pictures",))


def test_plain_text_prompts_have_no_images(dataset):
    plain = {**row("x", [IMAGE]), "prompt": "<image>?"}
    with raises("data.plain-text-prompt", "an image"):
        dataset([plain], apply_chat_template=False)


def test_settings_of_the_image_processor(dataset, reader, task):
    def tokens(**options):
        images = replace(reader, processor=ImageProcessor(str(task / "model"), options))
        (image,) = dataset([row("<image>?", [{"bytes": png(112, 112)}])], images=images)[0]["images"]
        return image.rows * image.columns

    assert tokens() == 16 and tokens(max_pixels=56 * 56) == 4
    with raises("image.unknown-setting", "'max_pixel'", "'max_pixels'", "data.mm_processor_kwargs"):
        tokens(max_pixel=56 * 56)


def test_prompts_with_images_are_never_cut(dataset):
    rows = [row("word " * 30), row("<image>?", [{"bytes": png(280, 280)}]), row("short")]
    limits = {"max_prompt_length": 60}
    for truncation in ("error", "left"):
        with raises("data.prompt-too-long", "row 0", "data.filter_overlong_prompts", "never cut"):
            dataset(rows[1:], truncation=truncation, **limits)
    data = dataset(rows, filter_overlong_prompts=True, **limits)
    assert data.dropped == 2 and [sample["index"] for sample in (data[i] for i in range(len(data)))] == [2]
    cut = dataset([rows[0], rows[2]], truncation="left", **limits)
    assert len(cut[0]["prompt_ids"]) == 60
    length = len(dataset([rows[1]], max_prompt_length=400)[0]["prompt_ids"])
    assert dataset([rows[1]], max_prompt_length=length)[0]["images"] and length > 64  # 8 x 8 for the image


def test_lengths_are_cached_by_images_and_settings(dataset, vision_tokenizer, reader, task, tmp_path, monkeypatch):
    monkeypatch.setattr("megarl.data.lengths.KEPT_ROWS", 0)
    path, read = tmp_path / "a.png", []
    path.write_bytes(WIDE)
    kind = type(reader.processor)
    process = kind.read

    def counting(self, data, location, was_checked=False):
        read.append(location)
        return process(self, data, location, was_checked=was_checked)

    monkeypatch.setattr(kind, "read", counting)

    (tmp_path / "rows.jsonl").write_text(json.dumps(row("<image>?", ["a.png"])), encoding="utf-8")

    def processed(images=reader):
        read.clear()
        cache = str(tmp_path / "cache")
        data = RLHFDataset(
            str(tmp_path / "rows.jsonl"), vision_tokenizer, 200, images=images, media=(), cache_dir=cache
        )
        return len(read), len(data[0]["prompt_ids"])

    first, cached = processed(), processed()
    assert first[0] == cached[0] + 1 and first[1] == cached[1]
    path.write_bytes(png(280, 280))  # another file of the same name
    assert processed()[0] == first[0]
    smaller = replace(reader, processor=ImageProcessor(str(task / "model"), {"max_pixels": 56 * 56}))
    assert processed(images=smaller) == (first[0], len(dataset([row("<image>?", [IMAGE])])[0]["prompt_ids"]))


def test_unselected_rows_are_not_decoded(dataset, monkeypatch):
    rows = [row("<image>?", [IMAGE]), row("<image>?", [{"bytes": b"no picture"}]), row("<image>?", [{"bytes": WIDE}])]
    (seed,) = [seed for seed in range(20) if sample_rows(3, 2, seed).tolist() == [0, 2]][:1]
    for kept in (4096, 0):  # measured at each start, and cached
        monkeypatch.setattr("megarl.data.lengths.KEPT_ROWS", kept)
        first, chosen = dataset(rows, max_samples=1), dataset(rows, max_samples=2, sample_seed=seed)
        assert len(first) == 1 and [chosen[number]["images"][0].data for number in (0, 1)] == [PICTURE, WIDE]
        length = len(chosen[1]["prompt_ids"])
        with raises("data.prompt-too-long", "row 2", length):
            dataset(rows, max_samples=2, sample_seed=seed, max_prompt_length=length - 1)
        with raises("image.unknown-format", "row 1"):
            dataset(rows, max_samples=2)


def test_fingerprints_read_no_embedded_image(write, reader, tmp_path):
    part = {"type": "image", "image": {"bytes": PICTURE, "path": None}}
    text = {"type": "text", "text": "?", "image": None}
    rows = [
        row([{"role": "user", "content": [part, text]}], [{"bytes": WIDE, "path": "a.png"}], other=[IMAGE]),
        row([{"role": "user", "content": [text]}], None, other=None),
        row([{"role": "user", "content": [text]}], [{"bytes": None, "path": "b.png"}], other=[]),
    ]
    source = Rows(write(filled(rows)), "prompt", parts=True, media=())
    read = source.select(("images", "other", "nothing"), [0, 2, 1], has_bytes=False)
    files = [[{"path": "a.png"}], [{"path": "b.png"}], None]
    assert read == [{"images": f, "other": o, "nothing": None} for f, o in zip(files, [[{}], [], None], strict=True)]
    (message,) = source.select(("prompt",), [0], has_bytes=False)[0]["prompt"]
    assert [part.get("image") for part in message["content"]] == [{}, None]
    before = [reader.identity(source, numbers, "prompt") for numbers in ([0, 1], [1, 2])]
    (tmp_path / "b.png").write_bytes(TALL)
    after = [reader.identity(source, numbers, "prompt") for numbers in ([0, 1], [1, 2])]
    assert before[0] == after[0] and before[1] != after[1]


def test_lengths_are_measured_in_processes(dataset, monkeypatch):
    monkeypatch.setattr("megarl.data.lengths.KEPT_ROWS", 0)
    data = dataset([row("<image>?", [IMAGE])] * 3 + [row("<image>?", [{"bytes": WIDE}])], workers=2)
    assert len(data) == 4


def test_batches_keep_images_and_ids(dataset, vision_tokenizer):
    data = dataset([row("<image>?", [IMAGE]), row("text"), row("<image>?", [{"bytes": WIDE}])])
    samples = [data[number] for number in range(3)]
    batch = data.collate(samples)
    assert batch.tensors["prompts"].dtype == torch.int64
    assert [ids.tolist() for ids in batch.unpadded("prompts")] == [sample["prompt_ids"] for sample in samples]
    repeated = batch.repeat(3)
    assert repeated.non_tensor_batch["images"][0] is repeated.non_tensor_batch["images"][1]
    single, packed = (len(pickle.dumps(part)) for part in (batch, repeated))
    assert packed - single < len(PICTURE) + len(WIDE)  # each file once
    restored = pickle.loads(pickle.dumps(DataProto.concat([repeated[:4], repeated[4:]])))
    assert restored.non_tensor_batch["images"].tolist() == repeated.non_tensor_batch["images"].tolist()
    assert torch.equal(restored.tensors["prompts"], repeated.tensors["prompts"])
    assert isinstance(restored.non_tensor_batch["images"][0][0], Image)


def test_prompts_with_other_pictures_have_other_digests(dataset):
    other = png(56, 56, 9)
    data = dataset([row("<image>?", [{"bytes": data}]) for data in (PICTURE, other, PICTURE)])
    batch = data.collate([data[number] for number in range(3)])
    digests = prompt_digests(ids.numpy() for ids in batch.unpadded("prompts")).tolist()
    assert digests[0] == digests[2] != digests[1] and DIGESTS == "prompt_digests"


class OwnRows(torch.utils.data.Dataset):
    """Samples as a user's class yields them."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = pq.read_table(data_files[0]).to_pylist()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        return self.rows[item]


def test_user_data_sets_have_images(write, reader, vision_tokenizer, image_token):
    def build(rows, images=reader, length=99):
        return CustomPrompts(
            OwnRows,
            [write(filled(rows))],
            vision_tokenizer,
            {},
            -1,
            reader=PromptReader(images=images),
            encoder=PromptEncoder(vision_tokenizer, image_token=None if images is None else image_token),
            max_prompt_length=length,
            truncation="left",
            reward_fn_key="data_source",
            media=("videos",) if images else ("images", "videos"),
        )

    rows = [row("<image>?", [IMAGE]), row("text", [])]
    data = build(rows)
    assert data[0]["images"] == (Image.of(PICTURE, 2, 2),) and data[1]["images"] == ()
    batch = CustomCollate(lambda samples: {"index": [s["index"] for s in samples]}, 0)([data[0], data[1]])
    assert batch.non_tensor_batch["images"].tolist() == [(Image.of(PICTURE, 2, 2),), ()]
    with raises("data.prompt-too-long", "row 0"):
        build(rows, length=12)
    with raises("data.media-column", "'images', row 0"):
        build(rows, images=None)[0]


def test_folder_of_relative_paths(write, tmp_path, question_rows):
    path = write(question_rows(1))
    rows = Rows(path, "prompt")
    assert rows.folder(0) == str(tmp_path) and Path(path).parent == tmp_path
