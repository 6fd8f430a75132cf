import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.expected_errors import raises

from megarl.convert.open import open_source
from megarl.models import check_model_folder, read_model_config
from megarl.models.carried_tensors import unused_tensors
from megarl.models.hf_checkpoint import HFReader
from megarl.models.hf_folder import equal_values, identify_model, read_header
from megarl.rollout.embedded import EmbeddedEngine


@pytest.fixture
def folder(real_model_folder, tmp_path):
    """A copy of a complete model folder, to be damaged."""
    return shutil.copytree(real_model_folder("qwen2"), tmp_path / "model")


def make_sharded(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    placed = {}
    for shard, mine in enumerate([names[::2], names[1::2]], start=1):
        file = f"model-{shard:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in mine}, folder / file)
        placed |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8"
    )
    return placed


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_complete_folder_passes_in_one_file_or_in_shards(folder):
    entry = check_model_folder(folder).tensors["model.norm.weight"]
    assert (entry.shape, entry.dtype) == ((32,), "F32")
    make_sharded(folder)
    checked = check_model_folder(folder)
    assert checked.config.num_layers == 2
    assert len({entry.file for entry in checked.tensors.values()}) == 2


def test_missing_shard_is_named(folder):
    make_sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with raises("model.missing-shard") as caught:
        check_model_folder(folder)
    assert str(caught.value) == (
        f"model folder {folder} lacks shard 'model-00002-of-00002.safetensors', which model.safetensors.index.json "
        "names [model.missing-shard]"
    )


def test_tensor_missing_in_its_shard_is_named(folder):
    placed = make_sharded(folder)
    save_file({"other": torch.zeros(1)}, folder / placed["model.norm.weight"])
    with raises("model.index-mismatch", folder / placed["model.norm.weight"]):
        check_model_folder(folder)


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with raises("model.no-weights", folder, "model.safetensors", "model.safetensors.index.json"):
        check_model_folder(folder)


def test_missing_tensor_is_named_with_its_shape(folder):
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with raises("model.missing-tensor") as caught:
        check_model_folder(folder)
    text = f"model folder {folder} lacks tensor 'lm_head.weight' of shape [50, 32]"
    assert str(caught.value) == f"{text} [model.missing-tensor]"


@pytest.mark.parametrize(("name", "shape"), [("model.norm.weight", (31,)), ("lm_head.weight", (51, 32))])
def test_wrong_shape_is_named_even_for_a_larger_tensor(folder, name, shape):
    rewrite(folder, lambda t: t.update({name: torch.zeros(shape)}))
    with raises("model.tensor-shape", folder / "model.safetensors", name, list(shape)):
        check_model_folder(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_named(folder, keep):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with raises("model.truncated-file", file):
        check_model_folder(folder)


@pytest.mark.parametrize("header", [b"{" * 16, b"[]              ", b'{"a": 1}        ', b'{"a": {}}       '])
def test_non_safetensors_file_is_named(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with raises("model.not-safetensors", folder / "model.safetensors"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "malformed-json"),
        ("[]", "not-json-object"),
        ("{}", "malformed-index"),
        ('{"weight_map": []}', "malformed-index"),
        ('{"weight_map": {"a": 1}}', "malformed-index"),
    ],
)
def test_malformed_index_is_named(folder, content, fault):
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with raises(f"model.{fault}", folder / "model.safetensors.index.json"):
        check_model_folder(folder)


def as_reward_model(folder, labels, *, bias=False):
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**raw, "architectures": ["Qwen2ForSequenceClassification"]}), encoding="utf-8"
    )

    def change(tensors):
        del tensors["lm_head.weight"]
        tensors["score.weight"] = torch.zeros(labels, 32)
        if bias:
            tensors["score.bias"] = torch.zeros(labels)

    rewrite(folder, change)


def test_head_with_several_labels_is_rejected(folder):
    as_reward_model(folder, 1)
    assert check_model_folder(folder).config.is_value_model
    rewrite(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(3, 32)}))
    with raises("model.head-labels", "'score.weight'", "Qwen2ForSequenceClassification", "3 labels", "num_labels=1"):
        check_model_folder(folder)


def test_head_bias_without_architecture_is_rejected(folder):
    as_reward_model(folder, 1, bias=True)
    with raises("model.head-bias", "'score.bias'", "Qwen2ForTokenClassification"):
        check_model_folder(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**raw, "architectures": ["Qwen2ForTokenClassification"]}), encoding="utf-8"
    )
    assert check_model_folder(folder).config.has_head_bias


@pytest.fixture
def tied(real_model_folder, tmp_path):
    """A tied model whose file has an output layer too: the embedding with one other element."""
    folder = shutil.copytree(real_model_folder("qwen2", tied=True), tmp_path / "tied")

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    rewrite(folder, add_head)
    return folder


def load_into_embedded_engine(folder):
    engine = EmbeddedEngine(read_model_config(folder))
    try:
        engine.load_hf(str(folder))
    finally:
        engine.shutdown()


@pytest.mark.parametrize("load", [check_model_folder, HFReader, identify_model, open_source, load_into_embedded_engine])
def test_a_tied_output_layer_that_is_not_the_embedding_is_refused(tied, load):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied)
    stored = load_file(tied / "model.safetensors")
    assert torch.equal(theirs.lm_head.weight, stored["lm_head.weight"]), "transformers uses the stored output layer"
    with raises("model.tied-head-differs", tied / "model.safetensors", "'lm_head.weight'", "tie_word_embeddings=false"):
        load(tied)
    raw = json.loads((tied / "config.json").read_text(encoding="utf-8"))
    (tied / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}), encoding="utf-8")
    load(tied)


def test_a_copy_of_the_embedding_as_output_layer_has_no_effect(tied):
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert unused_tensors(check_model_folder(tied)) == []
    assert open_source(tied).left_out == ()


@pytest.mark.parametrize(("narrow", "equal"), [(torch.bfloat16, True), (torch.float16, True), (torch.float64, False)])
def test_values_of_two_number_formats_are_compared(tmp_path, narrow, equal):
    values = torch.linspace(-3, 3, 60).view(6, 10).to(narrow if equal else torch.float32)
    save_file({"a": values.to(narrow), "b": values.float()}, tmp_path / "pair.safetensors")
    entries = read_header(tmp_path / "pair.safetensors")
    assert equal_values(entries["a"], entries["b"]) == equal
    assert not equal_values(entries["a"], entries["b"]._replace(shape=(10, 6)))


def test_unused_tensors_are_named(folder):
    assert unused_tensors(check_model_folder(folder)) == []
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}))
    assert unused_tensors(check_model_folder(folder)) == ["model.layers.0.self_attn.o_proj.bias"]
    assert open_source(folder).left_out == ("model.layers.0.self_attn.o_proj.bias",)
