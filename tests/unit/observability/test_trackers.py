"""W&B, Trackio and MLflow without a server, with the real packages where they are installed."""

import importlib.util
import json
import os
import sqlite3
import struct
import sys

import pyarrow as pa
import pytest
import torch.distributed
import yaml
from accelerate.state import PartialState

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability import trackers
from rlhf_ray.observability.metric_catalogue import HEADLINES, METRICS
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SampleWriter
from rlhf_ray.observability.trackers import mlflow_name, parameters

CONFIG = {"run": {"seed": 7, "dir": "x"}, "rewards": {"a": None},
          "environments": {"e": {"run": ["agent", "--key", "k1"], "variables": {"KEY": "k2"}, "api_key": "k3"}},
          "learner": {"max_tokens": 8, "url": "https://me:k4@host/path?key=k5"}}
GROUP = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
"""What a scheduler sets for a distributed group."""


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None,
                              reason=f"{package} is not installed: pip install 'rlhf-ray[{package}]'")


def logging_to(*names):
    return LoggingConfig(trackers=list(names), project="p", run_name="mine", tags=["blue"], tensorboard=False,
                         ray_metrics=False)


def write_steps(run, logging, steps, value, resume_at=None):
    writer = MetricsWriter(run, logging, resume_at)
    for step in steps:
        writer.write(step, {"reward/mean": value, "eval/pass@4": 0.5, "policy/loss": float("nan"),
                            "samples/bytes": 9.0})
    writer.close()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_a_config_error_that_names_the_fix(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"logging\.trackers=\['{name}'\] .*pip install {name}, or leave {name} out"):
        MetricsWriter(tmp_path, logging_to(name))


@pytest.mark.parametrize("given, said", [
    ("wandbb", r"trackers\.0='wandbb': must be one of wandb, trackio, mlflow, "),
    (["tensorboard"], r"logging\.tensorboard"),
])
def test_a_name_that_is_no_trackers_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        LoggingConfig(trackers=given)


def test_several_trackers_are_named_in_a_list_or_between_commas():
    assert LoggingConfig(trackers="wandb, trackio,wandb").trackers == ["wandb", "trackio"]
    assert LoggingConfig(trackers=["mlflow"]).trackers == ["mlflow"]


def test_a_row_has_at_most_one_metric_of_each_short_name():
    stages = {"sft/", "reward_model/", "process_reward/", "policy/"}
    described_by_name = {"eval/reward", *(f"{stage}grad_norm" for stage in stages - {"policy/"})}
    assert set(HEADLINES) - set(METRICS) == described_by_name
    assert not {"step", "time"} & set(HEADLINES.values()) and not any("/" in short for short in HEADLINES.values())
    for stage in stages:
        names = [short for name, short in HEADLINES.items() if not name.startswith(tuple(stages - {stage}))]
        assert len(names) == len(set(names)), stage


def wandb_records(file):
    """The records of an offline file: after seven bytes a log of LevelDB (its doc/log_format.md)."""
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (rest := -place % 32768) and rest < 7:  # too little of a block for a header
            place += rest
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_run(directory):
    """Of all parts of a W&B run that was recorded offline: ids, steps with rewards, and what else was logged."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process may still write when a run is finished
    found = {"ids": set(), "axes": set(), "rewards": [], "names": set(), "config": {}, "tags": set(), "title": set()}
    tables = [json.loads(file.read_text()) for file in directory.glob("wandb/offline-run-*/files/**/*.table.json")]
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file):
            record = Record.FromString(data)
            found["ids"] |= {record.run.run_id} - {""}
            found["axes"] |= {(record.metric.glob_name, record.metric.step_metric)} - {("", "")}
            found["title"] |= {record.run.display_name} - {""}
            found["tags"] |= set(record.run.tags)
            found["config"] |= {each.key: json.loads(each.value_json)
                                for each in (*record.run.config.update, *record.config.update)}
            row = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
            if "reward" in row:
                found["rewards"].append((row["step"], row["reward"]))
            found["names"] |= set(row)
    return {**found, "tables": [(table["columns"], table["data"]) for table in tables]}


def trackio_run(_):
    """The same of Trackio's database."""
    database = sqlite3.connect(os.path.join(os.environ["TRACKIO_DIR"], "p.db"))
    rows = [(run_id, name, step, json.loads(metrics)) for run_id, name, step, metrics in
            database.execute("select run_id, run_name, step, metrics from metrics order by id")]
    configs = [json.loads(config) for (config,) in database.execute("select config from configs")]
    tables = [row["samples"]["_value"] for *_, row in rows if "samples" in row]
    return {"ids": {run_id for run_id, *_ in rows}, "title": {name.rpartition("-")[0] for _, name, *_ in rows},
            "rewards": [(step, row["reward"]) for *_, step, row in rows],
            "names": {name for *_, row in rows for name in row}, "config": configs[-1],
            "tags": {configs[-1].pop("tags")},
            "tables": [(list(table[0]), [list(row.values()) for row in table]) for table in tables]}


@pytest.fixture(scope="module", params=[
    pytest.param(("wandb", wandb_run), marks=needs("wandb"), id="wandb"),
    pytest.param(("trackio", trackio_run), marks=needs("trackio"), id="trackio")])
def recorded(request, tmp_path_factory):
    """What a service recorded of a run that was resumed at step 2 after step 3, in a scheduler's environment."""
    name, read_back = request.param
    directory = tmp_path_factory.mktemp("run")
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    samples = pa.table({"step": [1] * 20, "sample": [0, 1] * 10, "prompt": [f"p{i}" for i in range(20)],
                        "response": ["r" * 9000] * 20, "score": [0.5] * 20, "kl": [0.1] * 20, "gold": [None] * 20})
    SampleWriter(directory / "samples").write(1, samples)
    with pytest.MonkeyPatch.context() as patched:
        environment = {**GROUP, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path_factory.mktemp("trackio"))}
        for variable, value in environment.items():
            patched.setenv(variable, value)
        before = dict(os.environ)
        write_steps(directory, logging_to(name), (1, 2, 3), 0.25)
        write_steps(directory, logging_to(name), (3, 4), 0.75, resume_at=2)
        changed = {key for key in {*before, *os.environ} if before.get(key) != os.environ.get(key)}
        return read_back(directory) | {"changed": changed}


def test_a_resumed_run_is_the_same_one_with_the_steps_that_were_made_again(recorded):
    assert len(recorded["ids"]) == 1
    assert recorded["rewards"] == [(1, 0.25), (2, 0.25), (3, 0.25), (3, 0.75), (4, 0.75)]
    assert recorded.get("axes") in ({("*", "step")}, None), "W&B plots against its own count of rows by default"


def test_a_service_gets_the_watched_metrics_by_short_names_and_the_others_by_section(recorded):
    assert {"reward", "eval/pass@4"} <= recorded["names"]
    assert not {"reward/mean", "policy/loss"} & recorded["names"]


def test_a_service_gets_name_tags_and_the_configuration_without_secrets(recorded):
    assert (recorded["title"], recorded["tags"]) == ({"mine"}, {"blue"})
    own = {name: value for name, value in recorded["config"].items() if not name.startswith("_")}
    assert own == {"run.seed": 7, "run.dir": "x", "learner.max_tokens": 8, "learner.url": "https://***@host/path?***"}


def test_a_service_gets_a_bounded_table_of_samples(recorded):
    [(columns, rows)] = recorded["tables"]
    assert columns == ["step", "prompt", "response", "reward", "kl"]
    assert [row[1] for row in rows] == [f"p{i}" for i in (*range(0, 20, 2), 1, 3)], "of different prompts first"
    assert {len(row[2]) for row in rows} == {trackers.TABLE_TEXT}


def test_a_service_sets_up_no_distribution(recorded):
    assert recorded["changed"] <= {"WANDB_SERVICE"}, "the address of W&B's own process"
    assert not torch.distributed.is_initialized()
    assert not PartialState._shared_state


@needs("wandb")
@pytest.mark.slow  # its login has a deadline of its own, of ten seconds
def test_wandb_records_offline_if_its_server_is_away(tmp_path, monkeypatch, caplog):
    import wandb

    wandb.teardown()  # it reads the environment once
    monkeypatch.setattr(trackers, "WANDB_ANSWERS_S", 1.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    write_steps(tmp_path, logging_to("wandb"), (1,), 0.25)
    found = wandb_run(tmp_path)
    assert (found["rewards"], found["ids"]) == ([(1, 0.25)], {(tmp_path / "wandb_run.txt").read_text()})
    assert "W&B records offline" in caplog.text


@pytest.fixture
def mlflow_of(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def client(run):
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")

    return client


MLFLOW = logging_to("mlflow")


@needs("mlflow")
def test_mlflow_keeps_a_resumed_run_in_its_directory_without_a_server(tmp_path, mlflow_of):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    before = dict(os.environ)
    write_steps(tmp_path, MLFLOW, (1, 2, 3), 0.25)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 8}}))  # MLflow refuses other values
    write_steps(tmp_path, MLFLOW, (3, 4), 0.75, resume_at=2)
    assert dict(os.environ) == before, "the next run of this process would take the address for the user's"
    client = mlflow_of(tmp_path)
    [experiment] = [each for each in client.search_experiments() if each.name == "p"]
    [run] = client.search_runs([experiment.experiment_id])
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward")]
    assert sorted(history) == [(1, 0.25), (2, 0.25), (3, 0.25), (3, 0.75), (4, 0.75)]
    assert run.data.params["run.seed"] == "7" and run.data.tags["blue"] == "true"
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert set(run.data.metrics) == {"reward", "eval/pass_4", "samples/bytes"}, "what is not finite is left out"


@needs("mlflow")
def test_a_tracking_server_that_is_not_there_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"cannot be opened at http://127\.0\.0\.1:9"):
        MetricsWriter(tmp_path, MLFLOW)


@needs("mlflow")
def test_a_run_that_goes_on_does_so_without_a_tracking_server_that_is_away(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    write_steps(tmp_path, MLFLOW, (3,), 0.75, resume_at=2)
    assert "MLflow gets no numbers" in caplog.text
    assert '"reward/mean": 0.75' in RunDirectory(tmp_path).metrics.read_text()


@needs("mlflow")
def test_a_tracking_store_that_breaks_costs_its_numbers_and_not_the_run(tmp_path, mlflow_of, caplog):
    writer = MetricsWriter(tmp_path, MLFLOW)
    mlflow_of(tmp_path).delete_run((tmp_path / "mlflow_run.txt").read_text())
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert "MLflow did not take the numbers of step 1" in caplog.text
    assert '"reward/mean": 0.5' in RunDirectory(tmp_path).metrics.read_text()


def test_parameters_are_flat_and_have_no_secrets(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "f": [1, 2], "g": "x" * 9000, "token": "k6", "token_variable": "T"}))
    assert dict(parameters(path)) == {
        "run.seed": 7, "run.dir": "x", "learner.max_tokens": 8, "learner.url": "https://***@host/path?***",
        "f": "[1, 2]", "g": "x" * 500, "token_variable": "T"}
    assert not dict(parameters(tmp_path / "none.yaml"))


def test_secrets_of_other_names_and_types_are_no_parameters(tmp_path):
    path = tmp_path / "config.yaml"
    options = {"password": 12345, "credentials": {"user": "k1", "value": "k2"}, "Authorization": "Bearer k3",
               "OPENAI_API_KEY": "k4", "auth": "k5", "headers": [{"X-Key": "k6"}],
               "parts": [{"token": "k7", "size": 3}],
               "urls": ["https://user:k8@k9@host/path", "http://u:k/10@host?k11", "https://host/x"]}
    path.write_text(yaml.safe_dump({"options": options, "importance": {"tokens": "truncate"}, "max_tokens": 4}))
    assert dict(parameters(path)) == {
        "options.parts.0.size": 3, "options.urls": "['https://***@host/path', 'http://***@host?***', 'https://host/x']",
        "importance.tokens": "truncate", "max_tokens": 4}


def test_mlflow_takes_the_names():
    assert mlflow_name("share/generator/busy (a)") == "share/generator/busy _a_"
