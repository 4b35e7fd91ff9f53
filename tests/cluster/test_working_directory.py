"""A run in a directory whose files are named like modules: neither the command nor a worker imports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.tiny import make_files, ppo_settings

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MODULES = ("json", "tokenizers", "random", "logging", "re", "ray", "torch", "vllm", "numpy", "yaml", "pickle", "wandb")
CODE = "import math\nimport beside\ndef score(responses): return [math.sqrt(beside.size(r)) for r in responses]\n"


@pytest.mark.parametrize("command", [[str(Path(sys.executable).with_name("rlhf-ray"))],
                                     [sys.executable, "-m", "rlhf_ray.cli.main"]], ids=["rlhf-ray", "python -m"])
def test_a_run_among_files_that_are_named_like_modules(tmp_path, command):
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')")
    (tmp_path / "math.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("def size(text): return len(text)")
    settings = ppo_settings(make_files(tmp_path), tmp_path / "run")
    settings["run"]["steps"] = 1
    settings["cluster"]["dashboard"] = True
    settings["rewards"] = {"length": {"type": "function", "function": "math.py:score"}}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, "ppo", "ppo.yaml"], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "reward/mean" in row] == [1]
