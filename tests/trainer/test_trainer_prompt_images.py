"""Keys about images: which models read them, and which columns must be empty."""

import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.expected_errors import raises
from support.squares_task import make_squares_task
from support.task_configs import arithmetic, evaluate_config, sft_config, train_config  # noqa: F401
from support.vision_models import png

from megarl.base.image_tokens import Image
from megarl.config.schema.distillation import TeacherConfig, TeacherServerConfig
from megarl.data import DataProto
from megarl.data.columns import attention_mask_of, pad_left
from megarl.data.tokenizers import load_tokenizer
from megarl.rollout.image_reader import image_reader
from megarl.trainer.jobs.early_checks import check_rows
from megarl.trainer.jobs.generate import answer_rows, write_answers
from megarl.trainer.phases.data_loading import prompt_loader, validation_loader
from megarl.trainer.phases.prompt_images import unread_columns


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"))


@pytest.fixture
def squares(task):
    """Changes of a configuration to the vision task."""
    return {
        "data.train_files": [str(task / "data" / "train.parquet")],
        "data.val_files": [str(task / "data" / "test.parquet")],
        "actor_rollout_ref.model.path": str(task / "model"),
    }


def test_a_vision_model_reads_images(train_config, squares, task):  # noqa: F811
    config = train_config(squares)
    check_rows(config)
    reader = image_reader(config)
    stored = json.loads((task / "model" / "config.json").read_text(encoding="utf-8"))
    assert (reader.key, reader.token, reader.processor.folder) == (
        "images",
        stored["image_token_id"],
        str(task / "model"),
    )
    assert "images" not in unread_columns(config) and "videos" in unread_columns(config)
    tokenizer = load_tokenizer(str(task / "model"))
    for loader in (prompt_loader(config, tokenizer), validation_loader(config, tokenizer)):
        batch = next(iter(loader))
        assert all(len(images) == 1 for images in batch.non_tensor_batch["images"])


def test_settings_reach_the_processor(train_config, squares):  # noqa: F811
    changes = {"data.mm_processor_kwargs": {"max_pixels": 56 * 56}, "data.image_patch_size": 14}
    assert image_reader(train_config({**squares, **changes})).processor.options == {"max_pixels": 56 * 56}
    with raises("data.image-patch-size", "data.image_patch_size=16", "14"):
        image_reader(train_config({**squares, "data.image_patch_size": 16}))


def test_models_of_text_refuse_images_early(train_config, evaluate_config, squares, arithmetic):  # noqa: F811
    text = {"actor_rollout_ref.model.path": str(arithmetic / "model")}
    with raises("data.media-column", "data.train_files", "column 'images', row 0"):
        check_rows(train_config({**squares, **text}))
    held_out = evaluate_config({"data.val_files": squares["data.val_files"], **text})
    check_rows(held_out)  # its model may be a checkpoint, which is found later
    with raises("data.media-column", "column 'images', row 0"):
        validation_loader(held_out, load_tokenizer(str(arithmetic / "model")))
    assert image_reader(train_config(text)) is None
    assert image_reader(train_config({**text, "data.image_patch_size": 14})) is None  # verl's default
    with raises("data.reads-no-images", "data.mm_processor_kwargs"):
        image_reader(train_config({**text, "data.mm_processor_kwargs": {"max_pixels": 3136}}))


def test_named_columns_must_be_empty_if_they_are_not_read(train_config, squares, tmp_path):  # noqa: F811
    rows = pq.read_table(squares["data.train_files"][0]).rename_columns({"images": "pictures"})
    pq.write_table(rows, tmp_path / "pictures.parquet")
    files = {"data.train_files": [str(tmp_path / "pictures.parquet")], "data.val_files": []}
    check_rows(train_config({**squares, **files, "data.image_key": "pictures"}))
    with raises("data.media-column", "column 'pictures', row 0"):
        check_rows(train_config({**squares, **files, "data.video_key": "pictures"}))


def test_supervised_training_refuses_images(sft_config, tmp_path):  # noqa: F811
    rows = [{"prompt": "<image>?", "response": "1", "images": [{"bytes": png(56, 56)}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sft.parquet")
    with raises("data.media-column", "data.train_files", "column 'images', row 0"):
        check_rows(sft_config({"data.train_files": [str(tmp_path / "sft.parquet")]}))


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:30000"]])
def test_teachers_on_servers_take_no_images(train_config, squares, urls):  # noqa: F811
    config = train_config(squares)
    teacher = TeacherConfig(server=TeacherServerConfig(urls=urls))
    distillation = dataclasses.replace(config.distillation, enabled=True, teacher_models={"t": teacher})
    distilled = dataclasses.replace(config, distillation=distillation)
    assert (image_reader(distilled) is None) == ("images" in unread_columns(distilled)) == bool(urls)


def test_answers_are_stored_in_the_form_of_data_files(task, tmp_path):
    tokenizer = load_tokenizer(str(task / "model"))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    image = Image.of(png(56, 56), 2, 2)
    columns = {"raw_prompt": [[message], [{"role": "user", "content": "x"}]], "images": [(image,), ()]}
    ids = [[5], [6]]
    tensors = {
        "prompts": pad_left(ids),
        "responses": pad_left(ids),
        "attention_mask": attention_mask_of([1] * 2, [1] * 2, 1, 1),
    }
    batch = DataProto.from_dict(tensors, columns)
    rows = answer_rows(batch, batch, 1, tokenizer)
    assert rows[0]["prompt"] == [{"role": "user", "content": "<image>?"}]
    for name in ("answers.parquet", "answers.jsonl"):
        write_answers(tmp_path / name, rows)
    stored = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["images"] for row in stored] == [[{"bytes": image.data}], []]
    line = json.loads((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert line["prompt"] == rows[0]["prompt"] and "images" not in line
