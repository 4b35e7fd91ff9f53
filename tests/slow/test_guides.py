"""Every command of the guides, run in an empty directory in the order in which a page gives them.

A fence whose first line names a file (```yaml ppo.yaml) is that file; a fence of `sh` is run. The quickstart's models,
which the pages begin from, are tiny ones here, and runs make two steps unless their command says otherwise.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import make_tiny_llama, make_tiny_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs/guides").glob("*.md") if page.name != "README.md")
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHECKOUT = ("rlhf_ray", "benchmarks", "tests", "docs", "configs", "launch", "pyproject.toml")
VOCABULARY = 64


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """What a quickstart leaves, with models that know nothing."""
    root = tmp_path_factory.mktemp("quickstart") / "runs/quickstart"
    shape = {"vocab": VOCABULARY, "hidden": 32, "positions": 128}
    make_tiny_llama(root / "sft/model", heads=1, **shape)
    make_tiny_reward_model(root / "reward_model/model", **shape)
    (root / "data").mkdir()
    for name, rows in (("prompts", 256), ("eval_prompts", 32)):
        lines = (json.dumps({"prompt": f"w{2 + i % 60} w{2 + i // 7 % 60}"}) for i in range(rows))
        (root / f"data/{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root.parents[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_guide_works(page, quickstart, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(quickstart, home)
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    assert any(language == "sh" for language, _, _ in fences)
    if any(language == "diff" for language, _, _ in fences):  # of a checkout
        for name in CHECKOUT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, home / name)
    for language, file, text in fences:
        if file:
            (home / file).write_text(text)
        elif language == "sh":
            run(text, home, page.stem)


def run(script: str, home: Path, page: str) -> None:
    """A fence of commands, with the package of this checkout, or of the one in `home`."""
    package = home if (home / "rlhf_ray").is_dir() else ROOT
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                   "PYTHONPATH": f"{package}:{home}", "RLHF_RAY_RUN__STEPS": "2"}
    answer = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=home, env=environment, text=True,
                            capture_output=True, timeout=900)
    assert answer.returncode == 0, f"{page}:\n{script}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
