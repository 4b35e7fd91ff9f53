"""Every command of the pages, run in the order in which a page gives them, where `make quickstart` was run before.

A fence whose first line names a file (```yaml ppo.yaml, or the comment `# ppo.yaml`) is that file; a fence of `sh` is
run, unless a comment above it says why not. Runs make two steps here unless their command says otherwise.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, fences

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
CHECKOUT = ("rlhf_ray", "benchmarks", "tests", "docs", "configs", "launch", "pyproject.toml")
TWO_STEPS = "export RLHF_RAY_RUN__STEPS=2\n"
COMMAND = """#!/bin/sh
if [ "$1" = preferences ]; then unset RLHF_RAY_RUN__STEPS; fi
exec {program} "$@"
"""
"""Preferences have no steps, and refuse the variable. A process of its own: pages kill it."""
RUNNABLE = [page for page in PAGES if any(fence.language == "sh" and not fence.why_not_run for fence in fences(page))]


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory):
    """A directory in which `make quickstart` was run, and which holds what users have of their own: models, data."""
    home = tmp_path_factory.mktemp("pages")
    (home / "bin").mkdir()
    (home / "bin/rlhf-ray").write_text(COMMAND.format(program=Path(sys.executable).with_name("rlhf-ray")))
    (home / "bin/rlhf-ray").chmod(0o755)
    run("rlhf-ray quickstart --run.steps=2", home, "quickstart")
    shutil.copytree(ROOT / "configs", home / "configs")
    (home / ".venv/bin").mkdir(parents=True)
    (home / ".venv/bin/activate").touch()
    made = home / "runs/quickstart"
    for_long_texts(shutil.copytree(made / "sft/model", home / "my-models/base"))
    (home / "data").mkdir()
    for name, file in (("prompts", "data/eval_prompts"), ("held_out_prompts", "data/eval_prompts"),
                       ("demonstrations", "preferences/preferences"), ("preferences", "preferences/preferences")):
        shutil.copy(made / f"{file}.jsonl", home / f"data/{name}.jsonl")
    demonstrations = home / "data/demonstrations.jsonl"
    demonstrations.write_text(demonstrations.read_text().replace('"chosen"', '"response"'))
    return home


def for_long_texts(model: Path) -> None:
    """The quickstart's model with a larger context: rotary positions have no weights."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_works(page, after_quickstart, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(after_quickstart, home)
    found = fences(page)
    if any(fence.language == "diff" for fence in found):  # of a checkout
        for name in CHECKOUT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, home / name, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, home / name)
    for fence in found:
        if fence.file:
            (home / fence.file).write_text(fence.text)
        elif fence.language == "sh" and not fence.why_not_run:
            run(TWO_STEPS + fence.text, home, page.stem)


def run(script: str, home: Path, page: str) -> None:
    """A fence of commands, with the package of this checkout, or of the one in `home`."""
    package = home if (home / "rlhf_ray").is_dir() else ROOT
    environment = {**os.environ, "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
                   "PYTHONPATH": f"{package}:{home}"}
    answer = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=home, env=environment, text=True,
                            input="The hotel was\n", capture_output=True, timeout=1500)
    assert answer.returncode == 0, f"{page}:\n{script}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
