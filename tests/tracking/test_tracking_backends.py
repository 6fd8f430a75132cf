import contextlib
import dataclasses
import io
import json
import math
import struct

import pytest
import yaml
from rich.console import Console as RichConsole
from support.expected_errors import raises

from megarl.tracking import Console, RunInfo, check_trackers, open_trackers, read_metrics

RUN_ID = "0123456789abcdef0123"
SAMPLES = [{"input": "What is 2 + 2?", "output": "4", "gts": "4", "score": 1.0}]


@pytest.fixture
def run(tmp_path):
    return RunInfo(
        project="arithmetic",
        name="first",
        folder=tmp_path / "run",
        config={"trainer": {"seed": 7}},
        run_id=RUN_ID,
        logs=tmp_path / "run" / "logs",
    )


def log_three_steps(trackers):
    for step in range(1, 4):
        trackers.log({"critic/score/mean": step / 8}, step)
    trackers.log_samples(SAMPLES, 3)
    trackers.finish()


def test_jsonl_rows_are_read_back(run):
    log_three_steps(open_trackers(["jsonl"], run))
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert [(row["step"], row["critic/score/mean"]) for row in rows] == [(1, 0.125), (2, 0.25), (3, 0.375)]


def test_console_tracker_prints_on_the_runs_console(tmp_path):
    text = io.StringIO()
    console = Console(3, output=RichConsole(file=text, width=110))
    log_three_steps(open_trackers(["console"], RunInfo("p", "n", tmp_path, console=console)))
    lines = text.getvalue().splitlines()
    assert lines[0] == "step 1/3  reward=0.125" and len(lines) == 5
    assert "What is 2 + 2?" in lines[3] and lines[4].split() == ["answer", "4", "score", "1.0"]


def test_tensorboard_events_are_read_back(run):
    log_three_steps(open_trackers(["tensorboard"], run))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert scalars == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert events.Tags()["tensors"] == ["samples/0/text_summary"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread ends
def test_tensorboard_goes_on_after_a_full_disk(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = []
    trackers = open_trackers(["tensorboard"], run, report=lines.append)
    trackers.log({"a": 1.0}, 1)
    (first,) = (run.folder / "tensorboard").iterdir()
    content = first.read_bytes()
    first.unlink()
    first.symlink_to("/dev/full")  # the writer opens its file again for each write
    trackers.log({"a": 2.0}, 2)
    first.unlink()
    first.write_bytes(content)  # there is space again
    trackers.log({"a": 3.0}, 3)
    trackers.finish()
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1.0), (3, 3.0)]
    assert len(lines) == 2 and "No space left on device" in lines[0]
    assert lines[1] == "tracker tensorboard: 1 of 3 records were not written"


@pytest.mark.parametrize(
    ("uri", "valid"),
    [
        (None, True),  # mlflow.db in the working folder
        ("sqlite:///other.db", True),
        ("http://127.0.0.1:1", True),
        ("sqlite:////proc/x/mlflow.db", False),
        ("./folder", False),
        ("mssql+nothing://a/b", False),
    ],
)
def test_check_of_mlflow_writes_nothing(uri, valid, tmp_path, monkeypatch):
    """A dry run makes the same check."""
    monkeypatch.chdir(tmp_path)
    import mlflow

    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if uri is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with contextlib.nullcontext() if valid else raises("tracking.mlflow-uri", f"MLFLOW_TRACKING_URI={uri!r}"):
        check_trackers(["mlflow"])
    assert list(tmp_path.iterdir()) == []


def test_mlflow_database_is_read_back_by_its_client(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # artifacts go to the working folder
    log_three_steps(open_trackers(["mlflow"], run))
    changed = {"trainer": {"seed": 8, "device": "cpu"}}
    resumed = open_trackers(["mlflow"], dataclasses.replace(run, resumed_step=3, config=changed))
    resumed.log({"critic/score/mean": 0.5, "val-core/sums/reward/mean@1": 0.75, "actor/grad_norm": float("nan")}, 4)
    resumed.finish()

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run_entity,) = client.search_runs([client.get_experiment_by_name("arithmetic").experiment_id])
    history = client.get_metric_history(run_entity.info.run_id, "critic/score/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert run_entity.data.metrics["val-core/sums/reward/mean_at_1"] == 0.75
    assert math.isnan(run_entity.data.metrics["actor/grad_norm"])
    assert (run_entity.info.run_name, run_entity.info.status) == ("first", "FINISHED")
    assert run_entity.data.params == {"trainer.seed": "7", "trainer.device": "cpu"}, "a parameter cannot be changed"
    (config,) = tmp_path.glob("mlruns/*/*/artifacts/config.json")
    assert json.loads(config.read_text(encoding="utf-8")) == changed
    (table,) = tmp_path.glob("mlruns/*/*/artifacts/samples/step_3.json")
    assert json.loads(table.read_text(encoding="utf-8")) == {
        "columns": ["input", "output", "gts", "score"],
        "data": [["What is 2 + 2?", "4", "4", "1.0"]],
    }


def swanlab_records(folder):
    """The records of an offline experiment, by SwanLab's reader."""
    from swanlab.log.backup.datastore import DataStore

    store, records = DataStore(), []
    store.open_for_scan(str(folder / "backup.swanlab"))
    while (record := store.scan()) is not None:
        records.append(json.loads(record))
    return records


def test_swanlab_offline_is_read_back_by_its_reader(run, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # whatever asks for the network is refused
    log_three_steps(open_trackers(["swanlab"], run))
    (folder,) = run.folder.glob("swanlog/run-*")
    records = [(record["model_type"], record["data"]) for record in swanlab_records(folder)]
    scalars = [data for kind, data in records if kind == "Scalar"]
    assert [(scalar["key"], scalar["step"], scalar["metric"]["data"]) for scalar in scalars] == [
        ("critic/score/mean", 1, 0.125), ("critic/score/mean", 2, 0.25), ("critic/score/mean", 3, 0.375),
    ]  # fmt: skip
    named = {kind: data["name"] for kind, data in records if kind in ("Project", "Experiment")}
    assert named == {"Project": "arithmetic", "Experiment": "first"}
    assert records[-1][0] == "Footer" and records[-1][1]["success"]
    assert yaml.safe_load((folder / "files" / "config.yaml").read_text(encoding="utf-8"))["trainer"]["value"] == {
        "seed": 7
    }
    (table,) = folder.glob("media/*/*.json")
    assert "What is 2 + 2?" in table.read_text(encoding="utf-8")


def wandb_records(path):
    """The records of a small offline run: a header of 7 bytes, then records of checksum, length, type and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, records = path.read_bytes(), 7, []
    assert data[:4] == b":W&B" and len(data) < 32768, "a longer file would be cut into blocks"
    while position < len(data):
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        assert kind == 1
        records.append(Record.FromString(data[position + 7 : position + 7 + length]))
        position += 7 + length
    return records


def wandb_run_id(path):
    (record,) = (record.run for record in wandb_records(path) if record.WhichOneof("record_type") == "run")
    return record.run_id


def test_wandb_offline_with_the_real_package(run, monkeypatch):
    """The package itself writes an offline run; nothing may reach for the network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # whatever asks for the network is refused
    log_three_steps(open_trackers(["wandb"], run))
    (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(file)
    (run_record,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    info = (run_record.project, run_record.display_name, run_record.run_id)
    assert info == ("arithmetic", "first", RUN_ID)
    config = {u.key: json.loads(u.value_json) for r in records for u in r.run.config.update}
    assert config["trainer"] == {"seed": 7}
    history = []
    for record in records:
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        if "critic/score/mean" in items:
            history.append((items["training/global_step"], items["critic/score/mean"]))
    assert history == [(1, 0.125), (2, 0.25), (3, 0.375)]
    (table,) = run.folder.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text(encoding="utf-8"))["data"] == [["What is 2 + 2?", "4", "4", "1.0"]]

    resumed = open_trackers(["wandb"], dataclasses.replace(run, resumed_step=1))
    resumed.log({"critic/score/mean": 0.5}, 2)
    resumed.finish()
    assert {wandb_run_id(path) for path in run.folder.glob("wandb/offline-run-*/*.wandb")} == {info[2]}
