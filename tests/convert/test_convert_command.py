"""The command line of the conversion: invalid folders, comparisons, interruptions."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from checkpoints import assert_same, run, tensors_of
from safetensors.torch import save_file
from support.expected_errors import raises

from megarl.convert import conversion
from megarl.convert.conversion import UnfinishedOutput
from megarl.convert.open import open_source

Model = Callable[[str], Path]
TOOL = Path(__file__).parents[2] / "tools" / "convert_ckpt.py"
KILLED_AT_THIRD_FILE = """
import os, signal, sys
from megarl.convert.command import main
from megarl.convert.conversion import UnfinishedOutput
record = UnfinishedOutput.record
def kill(self, name):
    if len(self.finished) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    record(self, name)
UnfinishedOutput.record = kill
main(sys.argv[1:])
"""


def broken(model, folder, damage):
    copytree(model, folder)
    config = folder / "config.json"
    tensors = tensors_of(model)
    match damage:
        case "no config":
            config.unlink()
        case "unknown architecture":
            config.write_text(
                json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"architectures": ["GPT2LMHeadModel"]}),
                encoding="utf-8",
            )
        case "missing shard":
            (folder / "model.safetensors").unlink()
            placed = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), encoding="utf-8")
        case "truncated":
            os.truncate(folder / "model.safetensors", 100_000)
        case "wrong shape":
            tensors["model.norm.weight"] = torch.ones(31)
            save_file(tensors, folder / "model.safetensors")
        case "neither":
            for file in folder.iterdir():
                file.unlink()
        case "pickled":
            (folder / "model.safetensors").unlink()
            config.unlink()
            torch.save(tensors, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("no config", ["[model.no-config-json]"]),
        ("unknown architecture", ["GPT2LMHeadModel", "qwen2", "[model.no-weight-map]"]),
        ("missing shard", ["'model-00001-of-00001.safetensors'", "[model.missing-shard]"]),
        ("truncated", ["bad/model.safetensors", "100000 bytes", "[model.truncated-file]"]),
        ("wrong shape", ["'model.norm.weight'", "[31]", "[32]", "[model.tensor-shape]"]),
        ("neither", ["config.json", ".metadata", "trainer.default_local_dir", "[convert.unknown-source]"]),
        ("pickled", ["pytorch_model.bin", "safetensors", "[convert.unknown-source]"]),
    ],
)
def test_invalid_model_folders_are_rejected(damage, expected, model, tmp_path, capsys):
    folder = broken(model("qwen2"), tmp_path / "bad", damage)
    run("hf-to-megatron", folder, tmp_path / "out", expect=1)
    message = capsys.readouterr().err
    assert all(part in message for part in expected), message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("missing", ["__0_0.distcp", "[checkpoint.missing-file]"]),
        ("truncated", ["__0_0.distcp", "1000 bytes", "[checkpoint.truncated-file]"]),
        ("no index", [".metadata", "[checkpoint.missing-index]"]),
        ("damaged", ["__0_0.distcp", "at byte", "[checkpoint.corrupt-file]"]),
        ("state", ["state.json", "[checkpoint.malformed-state]"]),
        ("other model", ["'model.layers.1.input_layernorm.weight'", "[32]", "[convert.config-mismatch]"]),
    ],
)
def test_invalid_role_checkpoints_are_rejected(damage, expected, model, tmp_path, capsys):
    role = tmp_path / "role"
    run("hf-to-megatron", model("qwen2"), role)
    config = role / "huggingface" / "config.json"
    match damage:
        case "missing":
            (role / "__0_0.distcp").unlink()
        case "truncated":
            os.truncate(role / "__0_0.distcp", 1000)
        case "no index":
            (role / ".metadata").unlink()
        case "damaged":
            with (role / "__0_0.distcp").open("r+b") as file:
                file.write(bytes(2000))
                file.seek(-2000, os.SEEK_END)
                file.write(bytes(2000))
        case "state":
            (role / "state.json").write_text("{}", encoding="utf-8")
        case "other model":
            config.write_text(
                json.dumps(
                    json.loads(config.read_text(encoding="utf-8")) | {"num_hidden_layers": 1, "layer_types": None}
                ),
                encoding="utf-8",
            )
    capsys.readouterr()
    run("megatron-to-hf", role, tmp_path / "out", expect=1)
    message = capsys.readouterr().err
    assert all(part in message for part in expected), message
    assert not (tmp_path / "out").exists()


def test_verify_reports_every_difference(model, tmp_path, capsys):
    source = model("qwen2")
    run("hf-to-megatron", source, tmp_path / "role")
    changed = copytree(source, tmp_path / "changed")
    tensors = tensors_of(source)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.25
    tensors["model.layers.1.mlp.up_proj.weight"][7, 5] -= 0.125
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, changed / "model.safetensors")
    capsys.readouterr()
    run("verify", tmp_path / "role", changed, expect=1)
    report = capsys.readouterr().out
    assert "different: 2" in report and "NOT equal: 27 tensors compared" in report
    assert "model.layers.1.mlp.up_proj.weight: 2 elements, by at most 0.25" in report
    assert "model.norm.weight: 1 elements, by at most nan" in report
    run("verify", changed, changed)

    capsys.readouterr()
    run("verify", source, model("qwen2_tied"), expect=1)
    assert "missing in" in (report := capsys.readouterr().out) and "  lm_head.weight" in report
    run("verify", model("qwen2_tied"), source, expect=1)
    assert "unexpected in" in capsys.readouterr().out
    run("verify", model("llama"), model("mistral"), expect=1)
    report = capsys.readouterr().out
    assert "different shapes" in report and "model.layers.0.self_attn.q_proj.weight: [32, 32] and [48, 32]" in report


def test_tokenizer_and_config_files_are_copied(model, tmp_path):
    source = copytree(model("qwen2"), tmp_path / "model")
    texts = {"tokenizer.json": "{}", "tokenizer_config.json": "[1]", "chat_template.jinja": "{{ x }}"}
    for name, text in texts.items():
        (source / name).write_text(text, encoding="utf-8")
    run("hf-to-megatron", source, tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "back")
    for name in (*texts, "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    before, after = (
        json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (source, tmp_path / "back")
    )
    assert before == after


def test_existing_output_needs_overwrite(model, tmp_path, capsys):
    run("hf-to-megatron", model("qwen2"), tmp_path / "role")
    run("hf-to-megatron", model("qwen3"), tmp_path / "role", expect=1)
    text = f"{tmp_path / 'role'} exists already; choose another destination, or pass --overwrite"
    assert f"{text} [convert.destination-exists]\n" in capsys.readouterr().err
    run("hf-to-megatron", model("qwen3"), tmp_path / "role", "--overwrite")
    run("verify", model("qwen3"), tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "role", "--overwrite", expect=1)
    assert "[convert.overlapping-folders]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["role"]


def test_a_full_disk_is_reported_before_writing(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conversion, "SPARE_BYTES", 1 << 60)
    run("hf-to-megatron", model("qwen2"), tmp_path / "role", expect=1)
    assert "[disk.no-space]" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.distcp"))


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_leaves_no_output_and_resumes(command, model, tmp_path, capsys):
    source, out = model("qwen2"), tmp_path / "out"
    if command == "megatron-to-hf":
        source = tmp_path / "role"
        run("hf-to-megatron", model("qwen2"), source)
    line = [command, str(source), str(out), "--max-shard-size", "40KB", "--workers", "1"]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_THIRD_FILE, *line], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    left = tmp_path / ".out.converting"
    with raises("convert.unknown-source" if command == "megatron-to-hf" else "checkpoint.missing-index", left):
        open_source(left)
    capsys.readouterr()
    run(*line, "--dtype", "bfloat16", expect=1)
    message = capsys.readouterr().err
    assert "--restart" in message and "[convert.interrupted-other]" in message
    run(*line)
    assert "2 of them from the interrupted conversion" in capsys.readouterr().out
    assert not left.exists() and not any("conversion" in path.name for path in out.iterdir())
    run("verify", source, out)


def test_an_interrupted_conversion_can_restart(model, tmp_path, monkeypatch, capsys):
    def interrupt(unfinished, name):
        if len(unfinished.finished) == 2:
            raise KeyboardInterrupt  # like Ctrl-C in the main thread while it waits for workers
        record(unfinished, name)

    record = UnfinishedOutput.record
    line = ["hf-to-megatron", str(model("qwen2")), str(tmp_path / "out"), "--max-shard-size", "40KB"]
    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedOutput, "record", interrupt)
        run(*line, "--dtype", "bfloat16", "--workers", "1", expect=130)
    assert "run the same command again" in capsys.readouterr().err and not (tmp_path / "out").exists()
    run(*line, "--restart")
    assert "from the interrupted conversion" not in capsys.readouterr().out
    run("verify", model("qwen2"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_tool_runs_without_megatron_and_without_options(model, tmp_path):
    """Run as a script that cannot import Megatron, Ray and transformers."""
    blocked = "import sys; sys.modules['megatron'] = sys.modules['ray'] = sys.modules['transformers'] = None; "
    lines = [
        [TOOL, "hf-to-megatron", model("qwen3_moe"), tmp_path / "role"],
        [TOOL, "megatron-to-hf", tmp_path / "role", tmp_path / "back"],
    ]
    start = f"{blocked}import runpy\nfor sys.argv in {[list(map(str, line)) for line in lines]}:\n"
    start += "    try:\n        runpy.run_path(sys.argv[0], run_name='__main__')\n"
    start += "    except SystemExit as stop:\n        assert not stop.code, stop.code\n"
    subprocess.run([sys.executable, "-c", start], check=True, timeout=120)
    assert_same(model("qwen3_moe"), tmp_path / "back")


@pytest.mark.parametrize(("option", "value"), [("--max-shard-size", "big"), ("--workers", "0"), ("--dtype", "int4")])
def test_invalid_options_are_rejected(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("hf-to-megatron", "a", "b", option, value)
    assert stopped.value.code == 2 and option in capsys.readouterr().err
