"""Weights & Biases and MLflow without a server, with the real packages where they are installed."""

import importlib.util
import sys

import pytest
import yaml

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.trackers import MLFLOW_RUN, mlflow_name, parameters

WANDB = LoggingConfig(wandb_project="p", tensorboard=False, ray_metrics=False)
MLFLOW = LoggingConfig(mlflow_experiment="e", tensorboard=False, ray_metrics=False)


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize("logging, package, said", [
    (WANDB, "wandb", r"logging\.wandb_project='p' .*pip install wandb,"),
    (MLFLOW, "mlflow", r"logging\.mlflow_experiment='e' .*pip install mlflow,"),
])
def test_a_missing_package_is_a_config_error_that_names_the_fix(tmp_path, monkeypatch, logging, package, said):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=said):
        MetricsWriter(tmp_path, logging)


@needs("wandb")
def test_wandb_records_offline_without_a_login(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = MetricsWriter(tmp_path, WANDB)
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.fixture
def mlflow_of(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def client(run):
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")

    return client


def write_steps(run, steps, value, resume_at=None):
    writer = MetricsWriter(run, MLFLOW, resume_at)
    for step in steps:
        writer.write(step, {"reward/mean": value, "eval/pass@4": 0.5, "policy/loss": float("nan")})
    writer.close()


@needs("mlflow")
def test_mlflow_keeps_numbers_and_configuration_in_the_runs_directory_without_a_server(tmp_path, mlflow_of):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 7, "dir": "x"}, "rewards": {"a": None}}))
    write_steps(tmp_path, (1, 2), 0.25)
    client, made = mlflow_of(tmp_path), (tmp_path / MLFLOW_RUN).read_text()
    assert [(m.step, m.value) for m in client.get_metric_history(made, "reward/mean")] == [(1, 0.25), (2, 0.25)]
    run = client.get_run(made)
    assert run.data.params == {"run.seed": "7", "run.dir": "x"}
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert set(run.data.metrics) == {"reward/mean", "eval/pass_4"}, "what is not finite is left out"


@needs("mlflow")
def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path, mlflow_of):
    write_steps(tmp_path, (1, 2, 3), 0.25)
    write_steps(tmp_path, (3, 4), 0.75, resume_at=2)
    client = mlflow_of(tmp_path)
    [experiment] = [e for e in client.search_experiments() if e.name == "e"]
    [run] = client.search_runs([experiment.experiment_id])
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "reward/mean")}
    assert history == {1: 0.25, 2: 0.25, 3: 0.75, 4: 0.75}


@needs("mlflow")
def test_a_tracking_server_that_is_not_there_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"cannot be opened at http://127\.0\.0\.1:9"):
        MetricsWriter(tmp_path, MLFLOW)


@needs("mlflow")
def test_a_run_that_goes_on_does_so_without_a_tracking_server_that_is_away(tmp_path, mlflow_of, monkeypatch, caplog):
    write_steps(tmp_path, (1, 2), 0.25)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    write_steps(tmp_path, (3,), 0.75, resume_at=2)
    assert "MLflow gets no numbers" in caplog.text
    assert '"reward/mean": 0.75' in RunDirectory(tmp_path).metrics.read_text()


@needs("mlflow")
def test_a_tracking_store_that_breaks_costs_its_numbers_and_not_the_run(tmp_path, mlflow_of, caplog):
    writer = MetricsWriter(tmp_path, MLFLOW)
    mlflow_of(tmp_path).delete_run((tmp_path / MLFLOW_RUN).read_text())
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert "MLflow did not take the numbers of step 1" in caplog.text
    assert '"reward/mean": 0.5' in RunDirectory(tmp_path).metrics.read_text()


def test_parameters_are_flat_and_names_are_what_mlflow_takes(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"a": {"b": {"c@d": 1}}, "e": None, "f": [1, 2], "g": "x" * 9000}))
    found = dict(parameters(path))
    assert found == {"a.b.c_d": "1", "f": "[1, 2]", "g": "x" * 500}
    assert parameters(tmp_path / "none.yaml") == []
    assert mlflow_name("share/generator/busy (a)") == "share/generator/busy _a_"
