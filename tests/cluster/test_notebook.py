"""A whole run in the kernel of a notebook: rows and a function are given as objects, progress and what the function
prints come out below the cell, then the report; and the command line says how to resume it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.tiny import make_files, ppo_settings

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CELLS = ("""
import re
import yaml
from datasets import Dataset
from rlhf_ray import PPOConfig, run

settings = yaml.safe_load(open("settings.yaml"))
rows = [{"prompt": f"w{i} w{i + 1}", "wanted": f"w{i}"} for i in range(2, 20)]
""", """
def matches(completions, wanted, **kwargs) -> list[float]:
    print("scoring", len(completions))
    return [float(len(re.findall(word, text))) for word, text in zip(wanted, completions)]
""", """
config = PPOConfig(**settings, rewards={"matches": matches}, prompts={"path": rows, "max_tokens": 8},
                   evaluation={"prompts": Dataset.from_list(rows[:4])})
summary = run(config)
print("made", summary["steps"], "steps")
""")


def executed(client, code):
    """What a cell gives: printed text, types of displayed data, and the error."""
    printed, shown = [], []

    def output(message):
        content = message["content"]
        if message["msg_type"] == "stream":
            printed.append(content["text"])
        elif message["msg_type"] == "display_data":
            shown.append(content["data"])

    reply = client.execute_interactive(code, output_hook=output, timeout=240)["content"]
    return SimpleNamespace(text="".join(printed), shown=shown, error=reply.get("evalue"))


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The outputs of the cells, and the directory in which the kernel runs."""
    from jupyter_client import KernelManager

    root = tmp_path_factory.mktemp("notebook")
    settings = ppo_settings(make_files(root), root / "run")
    settings["run"] |= {"steps": 2, "dir": "run"}
    settings["algorithm"] = {"estimator": "grpo"}
    settings["generator"]["workers"] = settings["policy"]["workers"] = 1
    for given in ("rewards", "prompts", "evaluation", "critic"):
        settings.pop(given)
    (root / "settings.yaml").write_text(yaml.safe_dump(settings))
    manager = KernelManager()
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(root))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield SimpleNamespace(root=root, outputs=[executed(client, cell) for cell in CELLS], client=client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_run_succeeds_and_its_progress_is_below_the_cell(session):
    last = session.outputs[-1]
    assert last.error is None and "GRPO: 2 of 2 steps to go\n" in last.text and "made 2 steps\n" in last.text
    assert [row["step"] for row in read_metrics(session.root / "run") if "reward/mean" in row] == [1, 2]


def test_what_the_function_prints_is_below_the_cell(session):
    assert "GRPO: rewards.matches: scoring " in session.outputs[-1].text


def test_the_report_is_shown_below_the_cell(session):
    (shown,) = session.outputs[-1].shown
    assert shown["text/html"].startswith("<iframe srcdoc=") and "reward" in shown["text/html"]


def test_inputs_are_files_in_the_runs_directory(session):
    config = yaml.safe_load((session.root / "run/config.yaml").read_text())
    function, name = config["rewards"]["matches"]["function"].split(":")
    assert name == "matches" and "import re\n" in (session.root / function).read_text()
    assert (session.root / config["prompts"]["path"]).read_text().count("\n") == 18
    assert Path(config["evaluation"]["prompts"]).parts[:2] == ("run", "inputs")


def test_the_same_call_resumes_it_and_the_command_line_says_so(session):
    done = subprocess.run([Path(sys.executable).with_name("rlhf-ray"), "ppo", "run/config.yaml", "--resume"],
                          cwd=session.root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "resume it by the same call" in done.stderr, done.stderr
    again = executed(session.client, """
settings["run"]["steps"] = 3
config = PPOConfig(**settings, rewards={"matches": matches}, prompts={"path": rows, "max_tokens": 8},
                   evaluation={"prompts": Dataset.from_list(rows[:4])})
print("now", run(config, resume=True)["steps"])
""")
    assert again.error is None and "now 3\n" in again.text
