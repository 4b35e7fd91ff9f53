"""Sinks, against the real TensorBoard reader, a real Ray and (where installed) the real W&B in offline mode."""

import importlib.util
import math
import re
import subprocess
import sys
import textwrap

import pytest

from rlhf_ray.config.loop import LoggingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.sinks import RaySink, gauge_name

TENSORBOARD = LoggingConfig(tensorboard=True, ray_metrics=False)


def scalars(run_dir, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(e.step, round(e.value, 6)) for e in events.Scalars(tag)]


def write_steps(run_dir, steps, value, resume_at=None):
    writer = MetricsWriter(run_dir, TENSORBOARD, resume_at)
    for step in steps:
        writer.write(step, {"reward/mean": value, "policy/loss": math.nan if step == 2 else 0.5})
    writer.close()


def test_tensorboard_reads_what_was_written_and_skips_what_is_not_finite(tmp_path):
    write_steps(tmp_path, (1, 2, 3), 0.25)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert [step for step, _ in scalars(tmp_path, "policy/loss")] == [1, 3]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_makes_again(tmp_path):
    write_steps(tmp_path, (1, 2, 3, 4), 0.25)
    write_steps(tmp_path, (3,), 0.75, resume_at=2)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.25), (3, 0.75)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_wandb_package_is_a_config_error_that_names_the_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"logging\.wandb_project='p' .*pip install"):
        MetricsWriter(tmp_path, LoggingConfig(wandb_project="p", tensorboard=False))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_records_offline_without_a_login(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = MetricsWriter(tmp_path, LoggingConfig(wandb_project="p", tensorboard=False, ray_metrics=False))
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("metric, gauge", [("reward/mean", "rlhf_reward_mean"), ("idle/a-b.c", "rlhf_idle_a_b_c")])
def test_gauge_names_are_what_prometheus_accepts(metric, gauge):
    assert gauge_name(metric) == gauge
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", gauge)


def test_without_ray_nothing_is_created_and_ray_is_not_imported():
    code = """
        import sys
        from rlhf_ray.observability.sinks import RaySink
        sink = RaySink("r")
        sink.write(1, {"reward/mean": 1.0})
        assert not sink._gauges
        assert not {"ray", "torch", "tensorboard", "plotly", "wandb"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.slow  # tests/cluster/test_interrupt.py looks at the endpoint of a whole run
@pytest.mark.cluster
def test_gauges_appear_on_rays_prometheus_endpoint(wait_for):
    import urllib.request

    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        sink = RaySink("my-run")
        sink.write(7, {"reward/mean": 0.625, "kl/sequence": 2.0})
        node = ray.nodes()[0]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

        def exported():
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
            lines = [line for line in text.splitlines() if 'run="my-run"' in line]
            values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
            return values if "ray_rlhf_reward_mean" in values and "ray_rlhf_step" in values else None

        values = wait_for(exported, seconds=90)
        assert values["ray_rlhf_reward_mean"] == 0.625
        assert values["ray_rlhf_kl_sequence"] == 2.0
        assert values["ray_rlhf_step"] == 7.0
        sink.close()
    finally:
        ray.shutdown()
