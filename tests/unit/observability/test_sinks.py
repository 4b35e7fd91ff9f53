"""Sinks, against the real TensorBoard reader and a real Ray."""

import math
import subprocess
import sys
import textwrap

import pytest

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.observability import prometheus
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.prometheus import Gauges, LiveValue, RaySink

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


def test_without_ray_nothing_is_created_and_ray_is_not_imported():
    code = """
        import sys
        from rlhf_ray.observability.prometheus import Gauges, LiveValue
        gauges = Gauges("r")
        gauges.set_row({"reward/mean": 1.0})
        gauges.set_live([LiveValue("live/step", 1.0, {})])
        assert not gauges._gauges
        assert not {"ray", "torch", "tensorboard", "plotly", "wandb"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.slow  # tests/cluster/test_interrupt.py looks at the endpoint of a whole run
def test_a_rows_gauges_are_repeated_until_the_next_for_ray_forgets_them(monkeypatch, wait_for):
    said = []
    monkeypatch.setattr(prometheus, "REPEAT_S", 0.02)
    monkeypatch.setattr(prometheus, "joined", lambda: True)
    monkeypatch.setattr(Gauges, "_set", lambda self, series, text, value: said.append((series.name, value)))
    sink = RaySink("r")
    sink.write(1, {"eval/gold": 0.5, "reward/mean": 1.0})
    sink.write(2, {"reward/mean": 2.0})
    said.clear()
    wait_for(lambda: True if len(said) > 6 else None, seconds=20)
    sink.close()
    assert set(said) == {("rlhf_eval_gold", 0.5), ("rlhf_reward_mean", 2.0), ("rlhf_step", 2.0)}
    count = len(said)
    assert not sink._thread.is_alive() and len(said) == count


@pytest.mark.cluster
def test_gauges_appear_on_rays_prometheus_endpoint(wait_for):
    import urllib.request

    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        sink, live = RaySink("my-run"), Gauges("my-run")
        sink.write(7, {"reward/mean": 0.625, "time/generate": 2.0, "share/generator/busy": 0.5})
        live.set_live([LiveValue("live/workers", 3, {"role": "generator", "pool": "default", "state": "busy"})])
        node = ray.nodes()[0]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

        def exported():
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
            ours = [line for line in text.splitlines() if 'run="my-run"' in line]
            return text if len(ours) == 5 else None

        text = wait_for(exported, seconds=90)
        assert value_of(text, "ray_rlhf_reward_mean") == 0.625
        assert value_of(text, "ray_rlhf_step") == 7.0
        assert value_of(text, "ray_rlhf_time", 'phase="generate"') == 2.0
        assert value_of(text, "ray_rlhf_share", 'role="generator"', 'cause="busy"') == 0.5
        assert value_of(text, "ray_rlhf_live_workers", 'role="generator"', 'pool="default"', 'state="busy"') == 3
        assert "# HELP ray_rlhf_time Time in which a kind of work was under way in the step (seconds)" in text
        sink.close()
    finally:
        ray.shutdown()


def value_of(text, name, *labels):
    """The value of one series in Prometheus's text format."""
    [line] = [line for line in text.splitlines()
              if line.startswith(name + "{") and all(label in line for label in ('run="my-run"', *labels))]
    return float(line.rsplit(" ", 1)[1])
