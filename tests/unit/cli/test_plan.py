"""`rlhf-ray plan` as a person calls it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.cli.plan import stage_of_file
from rlhf_ray.config.algorithm import COMMAND_OF
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "configs/recipes/one_gpu_0.5b_grpo.yaml")


def plan(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["plan", *arguments])


def test_a_page_for_people():
    answer = plan(RECIPE, "--nodes", "1x1xL40S")
    assert answer.exit_code == 0
    assert "node-0 GPU 0: generator, reference, policy" in answer.output
    assert "WW" in answer.output and "the run fits" in answer.output


def test_micro_batches_beside_pools_of_ones_own_are_shown_with_the_reason():
    placed = str(ROOT / "tests/unit/planning/placed/one_gpu_0.5b_grpo.yaml")
    answer = plan(placed, "--nodes=1x1xH100", "--policy.micro_batch_tokens=auto")
    assert answer.exit_code == 0
    assert re.search(r"policy\.micro_batch_tokens=32768 +the largest that fits, up to 32768", answer.output)
    assert "derived" not in plan(placed, "--nodes=1x1xH100").output


def test_what_cannot_fit_ends_with_2_and_overrides_count():
    answer = plan(RECIPE, "--nodes=1x1xL4", "--policy.gradient_checkpointing=false",
                  "--policy.micro_batch_tokens=16384")
    assert answer.exit_code == 2
    assert "set policy.gradient_checkpointing=0.5." in answer.output.replace("\n", " ")
    assert "the run cannot work" in answer.output


def test_buckets_that_are_too_large_and_compiled_layers_that_rule_zero_3_out_are_named(tmp_path):
    file = tmp_path / "ppo.yaml"
    file.write_text("model: {path: Qwen/Qwen3-8B}\nprompts: {path: p.jsonl, max_tokens: 1024}\n"
                    "rewards: {right: {type: number}}\ngenerator: {sampling: {max_tokens: 1024}}\n")
    assert plan(str(file), "--nodes=1x8xH100").exit_code == 0
    compiled = plan(str(file), "--nodes=1x8xH100", "--policy.compile_layers=true")
    assert "leave out policy.compile_layers, which rules out zero_stage=3" in " ".join(compiled.output.split())
    large = plan(str(file), "--nodes=1x8xH100", "--pools.default.bundles=8", "--pools.default.gpus=1",
                 "--generator.gpus=1", "--generator.workers=4", "--policy.gpus=1", "--policy.workers=4",
                 "--critic.gpus=0", "--algorithm.estimator=reinforce", "--policy.zero_stage=3",
                 "--policy.gradient_checkpointing=true", "--policy.autocast=bfloat16",
                 "--model.dtype=bfloat16", "--weights.transport=nccl", "--weights.bucket_mb=30000")
    assert "weights.bucket_mb=1024" in " ".join(large.output.split())


def test_who_plans_for_gpus_on_a_machine_without_is_told_how(monkeypatch):
    monkeypatch.setattr("rlhf_ray.planning.local_machine.gpus_here", list)
    assert "this machine has no GPU; plan for one that has with, say, --nodes" in plan(RECIPE).output
    assert "this machine has no GPU" not in plan(RECIPE, "--nodes=1x1xL40S").output


class TestDerived:
    """Settings for GPUs that nobody made."""

    @pytest.fixture
    def file(self, tmp_path):
        file = tmp_path / "grpo.yaml"
        file.write_text("model: {path: Qwen/Qwen3-8B}\nprompts: {path: p.jsonl, max_tokens: 1024}\n"
                        "rewards: {right: {type: number}}\nalgorithm: {estimator: grpo}\n"
                        "coordinator: {samples_per_prompt: 8}\ngenerator: {sampling: {max_tokens: 1024}}\n")
        return file

    def test_are_shown_with_their_reasons(self, file):
        output = plan(str(file), "--nodes", "1x8xH100").output
        assert "node-0 GPU 0-7: generator, reference, policy" in output and "the run fits" in output
        assert re.search(r"policy\.optimizer\.learning_rate=1e-06 +the default times 4096 / hidden size", output)
        assert "derived" not in plan(str(file), "--nodes", "1x(cpus=8,memory=512)").output

    def test_are_written_as_values_of_ones_own(self, file, tmp_path):
        written = tmp_path / "settled.yaml"
        first = json.loads(plan(str(file), "--nodes", "1x8xH100", "--json", "--write", str(written)).output)
        assert "policy.zero_stage" in first["derived"]
        config = load(PPOConfig, written, [])
        assert config.cluster.derived == [] and config.policy.autocast == "bfloat16"
        again = json.loads(plan(str(written), "--nodes", "1x8xH100", "--json").output)
        assert again == first | {"derived": {}}

    def test_a_file_that_cannot_be_written_is_refused(self, file, tmp_path):
        answer = plan(str(file), "--nodes", "1x8xH100", "--write", str(tmp_path / "none" / "x.yaml"))
        assert isinstance(answer.exception, ConfigError) and "cannot be written" in str(answer.exception)

    def test_gpus_without_a_role_are_a_warning(self, file):
        answer = plan(str(file), "--nodes", "1x8xH100", "--pools.default.cpus=8", "--model.path=Qwen/Qwen2.5-0.5B",
                      "--generator.kv_cache_mb=1024")
        assert answer.exit_code == 0
        assert "idle: 8 of 8 GPUs are idle: every role is on CPUs" in answer.output


def test_values_without_effect_are_named(caplog):
    assert plan(RECIPE, "--critic.head_dropout=0.3", "--nodes=1x1xH100").exit_code == 0
    assert "critic.head_dropout=0.3 [--critic.head_dropout] has no effect" in caplog.text


def test_json_is_nothing_else():
    values = json.loads(plan(RECIPE, "--nodes", "1x1xL40S", "--json").output)
    assert values["fits"] and values["nodes"][0]["gpu"] == "L40S"


@pytest.mark.parametrize(("name", "options", "method"), [
    ("a.yaml", ["--stage=grpo"], "GRPO"), ("my_grpo.yaml", [], "GRPO"), ("a.yaml", [], "PPO"),
    ("my_grpo.yaml", ["--algorithm.estimator=reinforce"], "REINFORCE"), ("rloo-or-grpo.yaml", [], "PPO")])
def test_the_method_is_planned_with_its_own_defaults_and_named(name, options, method, tmp_path):
    file = tmp_path / name
    file.write_text("model: {path: Qwen/Qwen2.5-0.5B}\nrewards: {r: {type: exact_match}}\nprompts: {path: p.jsonl}\n")
    values = json.loads(plan(str(file), *options, "--nodes=1x1xH100", "--json").output)
    assert (values["method"], "critic" in values["roles"]) == (method, method == "PPO")
    assert (" x 8 samples" in values["batch"]["batch"], "reference" in values["roles"]) == (
        method == "GRPO", method != "GRPO")
    assert f"method      {method} " in plan(str(file), *options, "--nodes=1x1xH100").output


def test_this_machine_is_the_default(tmp_path):
    config = tmp_path / "sft.yaml"
    config.write_text("model: {architecture: {hidden_size: 64}, tokenizer: Qwen/Qwen2.5-0.5B}\n"
                      "data: {path: rows.jsonl}\n")
    answer = plan(str(config), "--json")
    values = json.loads(answer.output)
    assert values["nodes"][0]["name"] == "this machine"
    assert list(values["roles"]) == ["learner", "data_reader"]


def test_a_shape_may_be_told(tmp_path):
    arguments = (RECIPE, "--nodes", "1x1xL40S", "--model.path=/not/here", "--json")
    answer = plan(*arguments, "--shape", "/not/here=Qwen/Qwen2.5-1.5B")
    assert json.loads(answer.output)["roles"]["policy"]["parameters"] == [1543569408]


COMMAND = re.compile(r"^rlhf-ray plan (configs/.+)$", re.MULTILINE)


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_shows_what_its_commands_print(number, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/plan.md").read_text()
    command = COMMAND.findall(page)[number]
    shown = re.findall(r"```text\n(.+?)\n```", page, re.DOTALL)[number]
    answer = CliRunner(env={"COLUMNS": "112"}).invoke(app, ["plan", *shlex.split(command)])
    printed = "\n".join(line.rstrip() for line in answer.output.splitlines())
    assert shown.strip() in printed


def test_every_command_of_the_page_works(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = COMMAND.findall((ROOT / "docs/plan.md").read_text())
    assert [plan(*shlex.split(command)).exit_code for command in commands] == [0, 2, 0]


@pytest.mark.parametrize(("values", "name", "stage"), [
    ({"rewards": {}}, "x", "ppo"), ({"pairs": {}, "prompts": {}}, "x", "preferences"),
    ({"steps": {}}, "x", "process-reward"),
    ({"data": {"chosen": "a"}}, "x", "reward-model"), ({"data": {}}, "reward_model", "reward-model"),
    ({"training": {"head_dropout": 0.1}}, "x", "reward-model"), ({"data": {}}, "x", "sft"),
])
def test_the_stage_is_told_by_sections(values, name, stage):
    assert stage_of_file(values, Path(f"{name}.yaml")) == stage


@pytest.mark.parametrize(("arguments", "told"), [
    ((), "give a configuration file"), ((RECIPE, "--nodes", "1x1xL4", "--cluster", "auto"), "give one of them"),
    ((RECIPE, "--stage", "dpo"), "there is no such stage"),
    ((RECIPE, "--nodes", "1x1xL4", "--shape", "x"), "MODEL=LIKE"),
])
def test_what_makes_no_sense_is_refused(arguments, told):
    answer = plan(*arguments)
    assert isinstance(answer.exception, ConfigError)
    assert told in str(answer.exception)


def test_a_submitted_run_is_started_by_the_command_of_its_method(tmp_path):
    from rlhf_ray.cli.submit import _configuration

    file = tmp_path / "a.yaml"
    file.write_text("run: {dir: /shared/a}\nmodel: {path: m}\nrewards: {r: {type: exact_match}}\nprompts: {path: p}\n")
    for stage in ("grpo", "rloo", "reinforce", "ppo"):
        config, command = _configuration(stage, file, [])
        assert command == stage and COMMAND_OF[config.algorithm.estimator.type] == stage
