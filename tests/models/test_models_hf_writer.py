import json
import resource
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_weights import tiny_config
from safetensors.torch import load_file, save_file
from support.expected_errors import raises

from megarl.base.errors import ExportError
from megarl.models import LocalParam, ParallelLayout, Piece, WeightMap, read_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.hf_writer import HFWriter, exported_config


def export(source, target, layout, dtype=torch.float32, order=None, **options):
    """All ranks of a layout load a folder, then export it again."""
    reader = HFReader(source)
    weight_map = WeightMap(reader.config, value_head=reader.config.is_value_model)
    with HFWriter(target, reader.config, weight_map.hf_shapes(), copy_from=source, **options) as writer:
        for rank in order or range(layout.world_size):
            local = dict(load_local(reader, weight_map.megatron_params(layout, rank), dtype))
            for param in weight_map.export_params(layout, rank):
                writer.add(param, local[param.name])


def load_all(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def save_model(folder, config, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = WeightMap(config).hf_shapes()
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.raw), encoding="utf-8")
    return tensors


@st.composite
def round_trips(draw):
    tp, pp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    groups = tp * draw(st.integers(1, 2))
    config = tiny_config(
        draw(st.sampled_from(["qwen2", "qwen3", "llama"])),
        layers=pp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 6)),
        ffn=tp * draw(st.integers(1, 3)),
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=draw(st.sampled_from([2, 4])),
        vocab=draw(st.integers(1, 150)),
        tied=draw(st.booleans()),
    )
    layout = ParallelLayout(tp, pp, dp)
    order = draw(st.permutations(range(layout.world_size)))
    return config, layout, order, draw(st.sampled_from([200, 2000, 1 << 30])), draw(st.booleans())


@settings(max_examples=25)
@given(round_trips())
def test_round_trip_is_bit_exact_in_any_layout_order_and_shard_size(tmp_path_factory, case):
    config, layout, order, shard_bytes, half = case
    folder = tmp_path_factory.mktemp("trip")
    (folder / "a").mkdir()
    dtype = torch.bfloat16 if half else torch.float32
    before = save_model(folder / "a", config, dtype)
    export(folder / "a", folder / "b", layout, dtype, order, max_shard_bytes=shard_bytes)
    after = load_all(folder / "b")
    assert after.keys() == before.keys()
    bits = torch.int16 if half else torch.int32
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name].view(bits), tensor.view(bits)), name
    HFReader(folder / "b")  # checks index, headers and shapes
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_transformers_computes_the_same_from_an_export(family, tied, real_model_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    source = real_model_folder(family, tied)
    export(source, tmp_path / "out", ParallelLayout(2, 2, 1), max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("out/model-*.safetensors"))) > 1
    ids = torch.arange(10)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (source, tmp_path / "out")]
    assert torch.equal(*logits)


def test_value_model_export_names_a_loadable_architecture(real_model_folder, tmp_path):
    from transformers import AutoModelForTokenClassification

    reader = HFReader(real_model_folder())
    weight_map = WeightMap(reader.config, value_head=True)
    score = torch.randn(1, 32)
    with HFWriter(tmp_path / "critic", reader.config, weight_map.hf_shapes()) as writer:
        params = weight_map.export_params(ParallelLayout(), 0)
        local = dict(load_local(reader, params, torch.float32, optional=("score.weight",)))
        for param in params:
            writer.add(param, local.get(param.name, score))
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(model.score.weight, score) and model.score.bias.item() == 0.0
    assert read_model_config(tmp_path / "critic").is_value_model
    export(tmp_path / "critic", tmp_path / "again", ParallelLayout(2, 1, 1))
    assert torch.equal(load_all(tmp_path / "again")["score.weight"], score)


def test_config_and_tokenizer_files_are_copied(real_model_folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = tiny_config()
    save_model(source, config)
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (source / "chat_template.jinja").write_text("{{ x }}", encoding="utf-8")
    (source / "optimizer.pt").write_text("no", encoding="utf-8")
    export(source, tmp_path / "out", ParallelLayout(), torch.bfloat16)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    written = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert written == {**config.raw, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("names", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"]])
def test_every_name_of_the_dtype_has_the_exported_one(names):
    config = tiny_config()
    config = replace(config, raw=config.raw | dict.fromkeys(names, "float32"))
    raw = exported_config(config, list(WeightMap(config).hf_shapes()), torch.bfloat16)
    assert {name: value for name, value in raw.items() if name.endswith("dtype")} == dict.fromkeys(names, "bfloat16")


@pytest.fixture
def two_tensors():
    return {"a": (4, 6), "b": (3,)}


def test_incomplete_export_leaves_no_folder(tmp_path, two_tensors):
    with raises("checkpoint.export-incomplete", "out", "2 tensors", "'a'"), writer_of(tmp_path, two_tensors) as writer:
        writer.add_piece(Piece("a", (0, 0), (4, 5), (0, 0)), torch.zeros(4, 5))
    with raises("checkpoint.export-incomplete", "2 tensors"), writer_of(tmp_path, two_tensors):
        pass
    assert list(tmp_path.iterdir()) == []


def test_failed_export_keeps_the_old_folder(tmp_path, two_tensors):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("old", encoding="utf-8")
    with pytest.raises(KeyError), writer_of(tmp_path, two_tensors, overwrite=True) as writer:
        writer.add_piece(Piece("b", (0,), (3,), (0,)), torch.zeros(3))
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out/old").read_text(
        encoding="utf-8"
    ) == "old"


@pytest.mark.parametrize("limit", [0, 100])
def test_files_that_cannot_be_written_are_an_error_with_a_remedy(tmp_path, two_tensors, limit):
    """The kernel refuses weights at the limit, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with (
            raises("disk.export-write", tmp_path / "out", "`megarl convert`", error=ExportError),
            writer_of(tmp_path, two_tensors) as writer,
        ):
            writer.add_piece(Piece("b", (0,), (3,), (0,)), torch.zeros(3))
            writer.add_piece(Piece("a", (0, 0), (4, 6), (0, 0)), torch.zeros(4, 6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_replaced_only_on_request(tmp_path, two_tensors):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("old", encoding="utf-8")
    with raises("checkpoint.export-exists", tmp_path / "out"):
        writer_of(tmp_path, two_tensors).__enter__()
    with writer_of(tmp_path, two_tensors, overwrite=True) as writer:
        writer.add_piece(Piece("a", (0, 0), (4, 6), (0, 0)), torch.ones(4, 6))
        writer.add_piece(Piece("b", (0,), (3,), (0,)), torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out/old").exists() and load_all(tmp_path / "out")["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("piece", "values", "code", "named"),
    [
        (Piece("c", (0,), (1,), (0,)), torch.zeros(1), "checkpoint.export-unknown-tensor", ["'c'"]),
        (Piece("a", (0, 0), (5, 6), (0, 0)), torch.zeros(5, 6), "model.slice-outside", ["'a'", [4, 6]]),
        (Piece("a", (0,), (4,), (0,)), torch.zeros(4), "model.slice-outside", ["'a'", [4, 6]]),
        (Piece("a", (0, 0), (2, 6), (0, 0)), torch.zeros(2, 5), "checkpoint.export-shape", ["'a'", [2, 5]]),
        (Piece("a", (2, 3), (4, 6), (0, 0)), torch.zeros(2, 3), "model.slice-overlap", ["'a'", [2, 3], [4, 6]]),
        (Piece("b", (0,), (1,), (0,)), torch.zeros(1), "checkpoint.export-overlap", ["'b'", [0]]),
        (
            Piece("a", (0, 0), (1, 1), (0, 0)),
            torch.zeros(1, 1, dtype=torch.half),
            "checkpoint.export-dtype",
            ["'a'", torch.float16],
        ),
    ],
)
def test_wrong_pieces_are_rejected(tmp_path, two_tensors, piece, values, code, named):
    with raises(code, *named), writer_of(tmp_path, two_tensors, max_shard_bytes=1) as writer:
        writer.add_piece(Piece("b", (0,), (3,), (0,)), torch.zeros(3))
        writer.add_piece(Piece("a", (3, 0), (4, 4), (0, 0)), torch.zeros(1, 4))
        writer.add_piece(piece, values)


def test_local_parameter_with_wrong_shape_is_rejected(tmp_path, two_tensors):
    param = LocalParam("x", (4, 6), (Piece("a", (0, 0), (4, 6), (0, 0)),))
    with raises("checkpoint.export-shape", "'x'", [4, 7], [4, 6]), writer_of(tmp_path, two_tensors) as writer:
        writer.add(param, torch.zeros(4, 7))


def writer_of(tmp_path, shapes, **options):
    return HFWriter(tmp_path / "out", tiny_config(), shapes, **options)
