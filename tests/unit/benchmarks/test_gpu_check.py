"""Where there is no GPU the check says so in one line; its table says what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check.settings import ON_CPU, ON_GPU
from benchmarks.gpu_check.table import Row, as_text

ROOT = Path(__file__).parents[3]


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    answer = subprocess.run([ROOT / "launch" / "gpu_check"], env=environment, capture_output=True, text=True,
                            timeout=120)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1 and "--cpu" in answer.stderr


def test_nccl_is_tried_where_there_are_two_gpus_and_ipc_on_one():
    assert [r.transport for r in ON_GPU.rounds(1)] == ["object_store", "ipc"]
    assert [(r.transport, r.apart) for r in ON_GPU.rounds(2)][-1] == ("nccl", True)
    assert [r.transport for r in ON_CPU.rounds(0)] == ["object_store", "nccl"]


def test_its_sections_are_such_as_a_run_could_have():
    """Fields, bounds and placements are the configuration's own."""
    from rlhf_ray.config.combination_checks import check_transport
    from rlhf_ray.config.generation import WeightsConfig
    from rlhf_ray.config.stages import PPOConfig

    for scale, gpus in ((ON_GPU, 1), (ON_GPU, 2)):
        for a_round in scale.rounds(gpus):
            generation, policy = scale.generation(a_round.apart), scale.policy(a_round.zero_stage, a_round.apart)
            check_transport(PPOConfig.model_construct(
                weights=WeightsConfig(transport=a_round.transport), generator=generation, policy=policy,
                pools={"default": scale.pool(a_round.apart)}))
            assert policy.micro_batch_tokens >= scale.context <= scale.architecture.max_positions


def test_what_it_measures_memory_against_is_the_plan_of_such_a_run(tmp_path):
    from benchmarks.gpu_check.measures import planned
    from rlhf_ray.config.model import ModelConfig
    from rlhf_ray.planning.hardware import gpu_of
    from tests.models import make_tiny_llama

    model = ModelConfig(path=str(make_tiny_llama(tmp_path / "m")))
    for scale, gpus in ((ON_CPU, 0), (ON_GPU, 2)):
        for a_round in scale.rounds(gpus):
            found = planned(scale, a_round, model, gpu_of("NVIDIA H100 80GB HBM3") if scale.gpu else None)
            assert found.keys() == {"generator", "policy_learner"} and min(found.values()) > 2**20


def test_the_table():
    text = as_text([Row("parity", "1e-05", "at most 0.1", True), Row("memory", "9 GiB", "planned 4", False),
                    Row("speed", "9 tokens/s")], "X: 3 s")
    assert text.splitlines() == ["| X: 3 s | | | |", "|---|---|---|---|", "| parity | 1e-05 | at most 0.1 | ok |",
                                 "| memory | 9 GiB | planned 4 | WRONG |", "| speed | 9 tokens/s |  |  |"]
