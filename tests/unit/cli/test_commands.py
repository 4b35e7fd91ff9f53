"""The commands: what they hand to the stages, and how errors end them."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rlhf_ray.cli import examples
from rlhf_ray.cli.examples import set_aside
from rlhf_ray.cli.stage import print_results, split_arguments
from rlhf_ray.config.model import Family
from rlhf_ray.config.stages import (
    GRPOConfig,
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
)
from rlhf_ray.errors import ConfigError, RunInterrupted, WorkerError
from rlhf_ray.observability.run_directory import RunDirectory

MODEL_AND_DATA = "model: {path: m}\ndata: {path: d}\n"
WITH_REWARDS = "model: {path: m}\nrewards: {main: {type: model, path: r}}\nprompts: {path: p}\n"
FILES = {
    "sft": ("sft", SFTConfig, MODEL_AND_DATA),
    "reward-model": ("reward_model", RewardModelConfig, MODEL_AND_DATA),
    "process-reward": ("process_reward", ProcessRewardConfig, MODEL_AND_DATA + "steps: {placeholder: x}\n"),
    "preferences": ("preferences", PreferencesStageConfig, "model: {path: m}\nprompts: {path: p}\n"),
    "ppo": ("ppo", PPOConfig, WITH_REWARDS),
    "grpo": ("ppo", GRPOConfig, WITH_REWARDS),
    "rloo": ("ppo", RLOOConfig, WITH_REWARDS),
    "reinforce": ("ppo", ReinforceConfig, WITH_REWARDS),
}


@pytest.mark.parametrize("command", FILES)
def test_a_stage_gets_its_resolved_configuration(command, command_line, stage, tmp_path):
    name, cls, text = FILES[command]
    calls = stage(name)
    (tmp_path / "c.yaml").write_text(text)
    assert command_line(command, str(tmp_path / "c.yaml"), "--run.seed=7", "--resume").code == 0
    ((args, kwargs),) = calls
    assert type(args[0]) is cls
    assert args[0].run.seed == 7
    assert kwargs == {"resume": True}


def test_a_run_begins_afresh_unless_told_to_resume(command_line, stage, ppo_file):
    calls = stage("ppo")
    command_line("ppo", ppo_file)
    assert calls[0][1] == {"resume": False}
    assert calls[0][0][0].buffer.capacity_mb == 256


def test_the_file_may_stand_anywhere(command_line, stage, ppo_file):
    calls = stage("ppo")
    for arguments in (
        [ppo_file, "--run.steps", "5"],
        ["--run.steps", "5", ppo_file],
        ["--run.steps=5", "--resume", ppo_file],
    ):
        assert command_line("ppo", *arguments).code == 0
    assert [args[0].run.steps for args, _ in calls] == [5, 5, 5]


def test_arguments_are_told_apart():
    assert split_arguments(["--a.b", "-1", "c.yaml", "--d.e=2"]) == (Path("c.yaml"), ["--a.b", "-1", "--d.e=2"])
    assert split_arguments(["--a.b=1"]) == (None, ["--a.b=1"])
    with pytest.raises(ConfigError, match=r"a\.yaml and b\.yaml"):
        split_arguments(["a.yaml", "b.yaml"])
    with pytest.raises(ConfigError, match=r"'run\.steps=3'; a field is changed by --run\.steps=3"):
        split_arguments(["a.yaml", "run.steps=3"])


def test_a_wrong_configuration_is_a_message_and_exit_code_2(command_line, stage, ppo_file):
    calls = stage("ppo")
    outcome = command_line("ppo", ppo_file, "--run.stepz=5")
    assert outcome.code == 2
    assert outcome.err.startswith("error: the configuration cannot run:\n  run.stepz: unknown key; did you mean steps?")
    assert "Traceback" not in outcome.err
    assert not calls


def test_no_arguments_says_what_is_missing(command_line):
    outcome = command_line("ppo")
    assert (outcome.code, outcome.err) == (
        2,
        "error: give a configuration file: rlhf-ray ppo CONFIG (what it may hold: --help)\n",
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunInterrupted("stopped by SIGINT"), 75), (WorkerError("policy_learner/0 died"), 69), (ConfigError("x"), 2)],
)
def test_our_errors_end_with_their_exit_code_and_message(error, code, command_line, stage, ppo_file):
    stage("ppo", error)
    outcome = command_line("ppo", ppo_file)
    # A run that was asked to stop has not failed, and is not told as if it had.
    assert (outcome.code, outcome.err) == (code, f"{'' if code == 75 else 'error: '}{error}\n")


def test_ctrl_c_ends_with_130(command_line, stage, ppo_file):
    stage("ppo", KeyboardInterrupt())
    assert command_line("ppo", ppo_file).code == 130


def test_a_disk_that_is_full_ends_with_a_message(command_line, stage, ppo_file):
    stage("ppo", OSError(errno.ENOSPC, "No space left on device", "/runs/mine/metrics.jsonl"))
    ended = command_line("ppo", ppo_file)
    assert ended.code == 1 and "Traceback" not in ended.err
    assert "the disk of /runs/mine/metrics.jsonl is full (No space left on device). Free some space" in ended.err


def test_other_errors_keep_their_traceback(command_line, stage, ppo_file):
    stage("ppo", ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        command_line("ppo", ppo_file)


def test_an_unknown_command_suggests_one(command_line):
    outcome = command_line("pqo")
    assert outcome.code == 2
    assert "ppo" in outcome.err


@pytest.mark.parametrize(("command", "answer"), [
    ("train", "each stage has its own command: sft, reward-model"), ("eval", "`rlhf-ray compare` compares two models"),
    ("dpo", "train a reward model with `rlhf-ray reward-model`"), ("reward_model_", "Did you mean 'reward-model'"),
    ("reinforce++", "--algorithm.preset=reinforce_pp"), ("Evaluation", "`rlhf-ray evaluate MODEL FILE`")])
def test_the_name_of_another_systems_command_gets_an_answer(command, answer, command_line):
    outcome = command_line(command, "x.yaml")
    assert outcome.code == 2
    assert answer in " ".join(outcome.err.replace("│", "").split())


def test_every_answer_names_commands_that_exist():
    from rlhf_ray.cli.main import NOT_HERE, SAME, app

    known = set(typer.main.get_command(app).commands)
    named = {word for answer in NOT_HERE.values() for word in re.findall(r"`rlhf-ray ([a-z-]+)", answer)}
    assert named <= known
    assert not known & (NOT_HERE.keys() | SAME.keys()) and NOT_HERE.keys() >= set(SAME.values())


class TestQuickstart:
    def test_the_families_are_those_of_new_models(self):
        assert examples.Family == Family

    def test_options_and_overrides_reach_the_stage(self, command_line, stage, tmp_path):
        calls = stage("quickstart")
        outcome = command_line("quickstart", "--dir", str(tmp_path / "q"), "--seed=3", "--family=qwen2",
                               "--run.steps=2", "--a.b", "c")
        assert outcome.code == 0
        assert calls == [((tmp_path / "q", 3, ["--run.steps=2", "--a.b", "c"], "qwen2"), {})]

    @pytest.mark.parametrize(
        ("finished", "flags", "aside"),
        [
            (False, [], False),
            (True, [], True),
            (False, ["--fresh"], True),
            (True, ["--resume"], False),
        ],
    )
    def test_what_is_there_goes_on_or_aside(self, finished, flags, aside, command_line, stage, tmp_path):
        stage("quickstart")
        run = tmp_path / "q"
        run.mkdir()
        # The PPO stage of a quickstart writes a summary of its own: that is no finished quickstart yet.
        (run / "summary.json").write_text(json.dumps({"stage": "quickstart" if finished else "ppo"}))
        assert command_line("quickstart", "--dir", str(run), *flags).code == 0
        assert (tmp_path / "q.1").is_dir() is aside
        assert run.is_dir() is not aside

    def test_moving_aside_keeps_what_was_moved_before(self, tmp_path):
        for content in ("first", "second"):
            (tmp_path / "q").mkdir()
            (tmp_path / "q" / "x").write_text(content)
            set_aside(tmp_path / "q")
        assert (tmp_path / "q.1" / "x").read_text() == "first"
        assert (tmp_path / "q.2" / "x").read_text() == "second"

    def test_the_working_directory_is_never_moved(self, tmp_path, monkeypatch):
        (tmp_path / "inside").mkdir()
        monkeypatch.chdir(tmp_path / "inside")
        for place in (Path(), tmp_path):
            with pytest.raises(ConfigError, match="give a separate directory"):
                set_aside(place)

    def test_a_stray_argument_is_refused(self, command_line, stage):
        calls = stage("quickstart")
        outcome = command_line("quickstart", "configs/x.yaml")
        assert outcome.code == 2
        assert "unexpected argument 'configs/x.yaml'" in outcome.err
        assert not calls


class TestReport:
    def test_it_is_written_from_a_runs_metrics(self, command_line, tmp_path):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.6}\n')
        outcome = command_line("report", str(tmp_path))
        assert outcome.code == 0, outcome.err
        assert outcome.out == f"wrote {tmp_path / 'report.html'}\n"
        assert "<html" in (tmp_path / "report.html").read_text()

    @pytest.mark.parametrize(("place", "words"), [("none", "there is no run directory"), (".", "holds no run")])
    def test_a_place_without_a_run(self, place, words, command_line, tmp_path):
        outcome = command_line("report", str(tmp_path / place))
        assert outcome.code == 2
        assert words in outcome.err


def test_libraries_are_quieted_by_commands_and_users_levels_kept(command_line, stage, ppo_file, monkeypatch):
    import os

    stage("ppo")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    command_line("ppo", ppo_file)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"


def test_our_own_warnings_stay_visible():
    code = (
        "import warnings; from rlhf_ray.cli.library_logging import quiet_libraries; quiet_libraries();"
        "warnings.warn_explicit('ours', UserWarning, 'f.py', 1, module='rlhf_ray.roles.generator');"
        "warnings.warn_explicit('theirs', FutureWarning, 'f.py', 2, module='transformers.x')"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "ours" in answer.stderr
    assert "theirs" not in answer.stderr


def test_an_error_in_a_pipe_is_plain_text():
    command = [sys.executable, "-m", "rlhf_ray.cli.main", "ppo", "none.yaml"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr == "error: there is no configuration file none.yaml; ready ones are in configs/\n"
    assert answer.stdout == ""


@pytest.mark.parametrize(("typed", "shown", "light"), [
    (None, "quickstart", set()),  # --help
    ("rlhf-ray reward-model --learner.zero", "--learner.zero_stage\n", {"pydantic", "yaml"}),
])
def test_neither_help_nor_completion_imports_a_library_that_takes_its_time(typed, shown, light):
    arguments = ["rlhf-ray", "--help"] if typed is None else ["rlhf-ray"]
    code = (f"import atexit, sys; from rlhf_ray.cli.main import main; sys.argv = {arguments};"
            "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()")
    completing = {} if typed is None else _completing(typed)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
                            env={**os.environ, **completing})
    heavy = {"torch", "transformers", "ray", "vllm", "deepspeed", "datasets", "numpy", "pandas", "pydantic", "yaml"}
    assert shown in answer.stdout and "rlhf_ray" in answer.stderr.split()
    assert not (heavy - light) & set(answer.stderr.split())


def _completing(typed: str) -> dict[str, str]:
    """The environment in which bash asks what could follow."""
    return {"_RLHF_RAY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}


@pytest.mark.parametrize(("typed", "completed"), [
    ("rlhf-ray rein", ["reinforce"]), ("rlhf-ray ppo --res", ["--resume"]), ("rlhf-ray data ", ["inspect"]),
    ("rlhf-ray export --pri", ["--private"]), ("rlhf-ray ppo c.yaml --critic.ba", ["--critic.backbone"]),
    ("rlhf-ray evaluate --critic.ba", []),  # an evaluation has no critic
    ("rlhf-ray ppo c", []),  # the shell completes files where there is nothing else
])
def test_a_shell_completes_commands_options_and_fields(typed, completed, command_line, monkeypatch):
    for name, value in _completing(typed).items():
        monkeypatch.setenv(name, value)
    assert command_line().out.split() == completed


def test_what_a_shell_shows_beside_a_field_is_one_line(command_line, monkeypatch):
    monkeypatch.setenv("_RLHF_RAY_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "rlhf-ray ppo --critic.")
    lines = command_line().out.splitlines()
    assert len(lines) > 20 and all(line.startswith("--critic.") for line in lines)


def test_a_finished_run_shows_what_it_reached_and_where(tmp_path, capsys):
    run = RunDirectory(tmp_path)
    run.evaluation.write_text(json.dumps({"before": {"reward": 1.0}, "after": {"reward": 2.5}}))
    run.metrics.write_text(json.dumps({"step": 30, "kl/sequence": 0.01, "policy/learning_rate": 1e-6}) + "\n")
    run.model.mkdir()
    print_results(run)
    table, header = capsys.readouterr().out, f"model: {run.model}"
    assert "+1.5 better" in table and "hardly moved: KL 0.01" in table and table.rstrip().endswith(header)


AT_ONCE = """
import sys, types
stage = types.ModuleType("rlhf_ray.stages.ppo")
def run(config, resume=False):
    {body}
stage.run = run
sys.modules[stage.__name__] = stage
from rlhf_ray.cli.main import main
sys.argv = ["rlhf-ray", "ppo", sys.argv[1]]
main()
"""


@pytest.mark.parametrize(("body", "code", "said"), [
    ("raise ZeroDivisionError('a bug')", 1, "ZeroDivisionError: a bug\n"),
    ("sys.exit('with a text')", 1, "with a text\n"),
])
def test_a_command_that_fails_at_once_says_so(ppo_file, body, code, said):
    """Each several times, because it depends on the moment."""
    command = [sys.executable, "-c", AT_ONCE.format(body=body), ppo_file]
    for process in [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors.endswith(said)) == (code, True), errors


@pytest.mark.parametrize("command", ["check-model", "generate", "compare", "serve-reward"])
def test_a_model_is_not_loaded_without_docstrings(command):
    code = f"import sys; sys.argv = ['rlhf-ray', '{command}', 'm']; from rlhf_ray.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: PYTHONOPTIMIZE=2 removes the docstrings")
