"""What follows from several sections, and what of it the loaded configuration contains."""

import pytest

from rlhf_ray.config.conditional_fields import in_sentences, without_effect
from rlhf_ray.config.derived import (
    buffer_capacity_mb,
    concurrency_of,
    derive,
    episode_kind,
    episodes_deadline_s,
    model_paths,
    placements_of,
)
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.load import STAGES, as_yaml, load, resolve
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.config.training_loop import BufferConfig, CoordinatorConfig
from rlhf_ray.data.row_readers import split_of
from rlhf_ray.errors import ConfigError
from tests.unit.config.conftest import MINIMAL


def test_a_critic_on_the_policy_s_backbone_is_no_role_of_its_own(write):
    config = load(STAGES["ppo"], write("ppo"), ["--critic.backbone=policy"])
    shared = derive(config)
    assert shared.shares_backbone and not shared.starts_critic and "critic" not in placements_of(config)
    config = load(STAGES["ppo"], write("ppo"), [])
    own = derive(config)
    assert own.starts_critic and not own.shares_backbone and "critic" in placements_of(config)
    without = derive(load(STAGES["ppo"], write("ppo"), ["--algorithm.estimator=reinforce"]))
    assert not without.shares_backbone and not without.starts_critic


FREE = "--algorithm.kl.coef=0"


@pytest.mark.parametrize(("changes", "where"), [
    ([], "workers"), ([FREE], "nowhere"), (["--policy.lora={}"], "policy"), ([FREE, "--policy.lora={}"], "nowhere"),
    ([FREE, "--algorithm.kl.placement=loss"], "nowhere"), ([FREE, "--early_stop.kl_above=9"], "workers"),
    ([FREE, "--reference.path=other"], "workers"), (["--policy.lora={}", "--reference.path=other"], "workers"),
    ([FREE, "--prompts.held_out=0.1", "--evaluation={}", "--checkpoint.best_metric=perplexity"], "workers"),
    ([FREE, "--prompts.held_out=0.1", "--evaluation={}", "--checkpoint.best_metric=reward"], "nowhere"),
], ids=str)
def test_a_reference_where_something_needs_it(write, changes, where):
    config = load(STAGES["ppo"], write("ppo"), changes)
    derived = derive(config)
    assert derived.uses_reference == (where != "nowhere") and derived.policy_is_reference == (where == "policy")
    assert derived.starts_reference == ("reference" in placements_of(config)) == (where == "workers")
    assert derived.reference_model.path == ("other" if "--reference.path=other" in changes else config.model.path)
    assert ("none" in derived.reference_in_words) == (where == "nowhere")


def test_models_that_are_named_are_loaded_in_the_policy_s_precision(write):
    config = load(STAGES["ppo"], write("ppo"), [
        "--model.dtype=bfloat16", "--model.float32_head=true", "--reference.path=r",
        "--reference.revision=v1", "--critic.path=c"])
    derived = derive(config)
    assert derived.reference_model == ModelConfig(path="r", revision="v1", dtype="bfloat16", float32_head=True)
    assert (derived.critic_model.path, derived.critic_model.dtype) == ("c", "bfloat16")
    assert model_paths(config, "reference") == [config.model.path, "r"]
    assert model_paths(config, "critic") == [config.model.path, "c"]


def test_the_placement_of_a_reference_that_nothing_needs_is_a_warning(write):
    config = load(STAGES["ppo"], write("ppo"), [FREE, "--reference.threads=2"])
    (sentence,) = in_sentences(without_effect(config))
    assert "reference.threads=2 has no effect: with algorithm.kl.coef=0" in sentence
    assert not list(without_effect(load(STAGES["ppo"], write("ppo"), [FREE, "--reference.path=r"])))


def test_other_held_out_rows_of_a_data_set_are_another_data_set(write):
    def selection(*changes):
        return derive(load(STAGES["ppo"], write("ppo"), ["--evaluation.prompts=team/set", *changes])
                      ).evaluation_prompts.selection

    assert selection() == selection("--evaluation.every=7")
    assert len({selection(), selection("--evaluation.limit=3"), selection("--evaluation.split=dev")}) == 3
    assert selection() == selection("--evaluation.split=test") == "team/set (split=test, limit=512)"


ONE_STEP = ["--algorithm.epochs=1", "--algorithm.mini_batches=1", "--algorithm.kl.placement=loss"]


@pytest.mark.parametrize(("changes", "own"), [
    ([], True), (["--algorithm.kl.placement=reward", "--algorithm.kl.coef=0"], True), (["--policy.lora={}"], True),
    (["--algorithm.epochs=2"], False), (["--algorithm.mini_batches=2"], False),
    (["--coordinator.max_staleness=1"], False), (["--algorithm.kl.placement=reward"], False),
    (["--algorithm.kl.kind=adaptive"], False), (["--algorithm.critic_warmup_steps=1"], False),
    (["--policy.lora.dropout=0.1"], False), (["--critic.backbone=policy"], False),
], ids=str)
def test_no_pass_for_old_logprobs_where_the_update_s_own_gives_them(write, changes, own):
    config = load(STAGES["ppo"], write("ppo"), [*ONE_STEP, *changes])
    assert derive(config).old_logprobs == ("update" if own else "policy")


def test_generators_logprobs_can_be_the_old_ones_whatever_the_number_of_steps(write):
    old = "--algorithm.old_logprobs=generator"
    assert derive(load(STAGES["ppo"], write("ppo"), [old])).old_logprobs == "generator"
    assert derive(load(STAGES["ppo"], write("ppo"), [old, *ONE_STEP])).old_logprobs == "generator"
    for change, field in (("--algorithm.importance.tokens=truncate", "set importance.tokens=none"),
                          ("--critic.backbone=policy", "algorithm.old_logprobs=generator saves")):
        with pytest.raises(ConfigError, match=field):
            load(STAGES["ppo"], write("ppo"), [old, change])


def test_generators_keep_two_chunks_or_twice_their_sequences_under_way_unless_the_number_is_given():
    generator = GenerationConfig(workers=3, chunk=16, max_sequences=4)
    assert concurrency_of(CoordinatorConfig(), generator) == 3 * 2 * 16
    assert concurrency_of(CoordinatorConfig(), generator.model_copy(update={"max_sequences": 64}), 5) == 5 * 2 * 64
    assert concurrency_of(CoordinatorConfig(concurrency=7), generator, 5) == 7


def test_the_buffer_has_half_of_a_local_store_and_no_bound_on_a_joined_cluster():
    local, joined = ClusterConfig(object_store_mb=300), ClusterConfig(address="auto", object_store_mb=300)
    assert [buffer_capacity_mb(BufferConfig(), cluster) for cluster in (local, joined)] == [150, None]
    assert buffer_capacity_mb(BufferConfig(capacity_mb=7), joined) == 7


def test_prompts_of_an_evaluation_are_read_as_those_of_training_but_for_what_is_given():
    prompts = {"path": "p", "max_tokens": 9, "system": "be brief", "column": "text", "split": "dev"}
    config = PPOConfig(**MINIMAL["ppo"] | {"prompts": prompts, "evaluation": {"prompts": "e", "limit": 5}})
    found = derive(config).evaluation_prompts
    assert (found.path, found.max_tokens, found.system) == ("e", 9, "be brief")
    assert (found.column, str(split_of(found)), found.limit, found.SECTION) == ("prompt", "test", 5, "evaluation")
    assert (str(split_of(config.prompts)), split_of(found).field) == ("dev", "evaluation.split")
    assert derive(PPOConfig(**MINIMAL["ppo"])).evaluation_prompts is None


def test_a_configuration_that_was_not_loaded_is_refused_when_it_is_resolved():
    unsound = PPOConfig(**MINIMAL["ppo"], critic={"init": "reward", "workers": 9})
    assert derive(unsound).critic_model.path == "r"
    with pytest.raises(ConfigError, match="critic 9x"):
        resolve(unsound)


def test_held_out_responses_are_sampled_as_in_training_but_for_what_is_given(write, tmp_path):
    path = write("ppo", generator={"sampling": {"max_tokens": 16, "temperature": 0.7}})
    config = load(STAGES["ppo"], path, ["--evaluation.prompts=e.jsonl", "--evaluation.sampling.temperature=0"])
    assert (config.evaluation.sampling.max_tokens, config.evaluation.sampling.temperature) == (16, 0)
    assert config.generator.sampling.temperature == 0.7 and derive(config).longest_response == 16
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert "max_tokens: 16" in (tmp_path / "saved.yaml").read_text().split("evaluation:")[1].split("early_stop:")[0]
    assert load(STAGES["ppo"], tmp_path / "saved.yaml", []) == config
    assert load(STAGES["ppo"], path, ["--evaluation.prompts=e.jsonl"]).evaluation.sampling is None


@pytest.mark.parametrize(("fields", "compiled"), [
    ({"gpus": 0}, False), ({"gpus": 1}, True), ({"gpus": 0.5, "zero_stage": 2}, True),
    ({"gpus": 1, "zero_stage": 3}, False),
    ({"gpus": 0, "compile_layers": True}, True), ({"gpus": 1, "compile_layers": False}, False)])
def test_layers_are_compiled_on_gpus_up_to_stage_2_unless_somebody_says_otherwise(fields, compiled):
    assert LearnerConfig(**fields).compiles_layers is compiled
    with pytest.raises(ConfigError, match="compile_layers=true compiles layers with the parameters they have"):
        LearnerConfig(gpus=1, zero_stage=3, compile_layers=True)


def test_a_call_to_a_runner_lasts_as_long_as_all_waves_of_its_episodes():
    environment = {"path": "e.py:E", "concurrency": 4, "timeout_s": {"episode": 100, "step": 10}}
    config = PPOConfig(model={"path": "m"}, prompts={"path": "p"}, environments={"e": environment},
                       coordinator={"concurrency": 12}, cluster={"call_timeout_s": 600})
    assert episodes_deadline_s(config) == 3 * 120 + 600  # 12 episodes, 4 at a time, and two steps' time to close each


SOURCES = {"tools": {"path": "shop.py:Shop"}, "program": {"command": {"run": ["sh", "agent.sh"]}},
           "code": {"python": {}}, "lake": {"gymnasium": {"id": "FrozenLake-v1"}},
           "sums": {"reasoning_gym": {"task": "chain_sum"}}, "shop": {"mcp": {"command": ["server"]}},
           "guess": {"openenv": {"url": "http://localhost:1"}}, "gym": {"nemo_gym": {"url": "http://localhost:1"}}}


@pytest.mark.parametrize("change", [
    "run.seed=1", "episode_runner.column=kind", "generator.sampling.temperature=0.5", "environments.tools.max_turns=3",
    "environments.tools.path=shop.py:Other", "environments.program.command.run=[sh, other.sh]",
    "environments.program.command.variables={LEVEL: two}", "environments.code.python.timeout_s=1",
    "environments.code.python.sandbox.memory_mib=256", "environments.lake.gymnasium.options={is_slippery: false}",
    "environments.sums.reasoning_gym.settings={max_digits: 2}", "environments.shop.mcp.tools=[buy]",
    "environments.shop.mcp.timeout_s=2", "environments.guess.openenv.url=http://localhost:2",
    "environments.gym.nemo_gym.url=http://localhost:2",
])
def test_episodes_do_not_continue_with_other_settings_of_what_they_read(write, change):
    assert _kind(write, change) != _kind(write)


@pytest.mark.parametrize("change", [
    "run.steps=7", "episode_runner.gateway_host=0.0.0.0", "episode_runner.workers=2", "environments.tools.processes=1",
    "environments.tools.timeout_s.episode=99", "environments.program.concurrency=3", "environments.tools.isolated=true",
    "environments.code.python.programs=4", "environments.guess.openenv.connect_s=1",
    "environments.guess.openenv.token_variable=TOKEN", "environments.gym.nemo_gym.token_variable=TOKEN",
])
def test_episodes_continue_whatever_does_not_change_what_they_read(write, change):
    assert _kind(write, change) == _kind(write)


def _kind(write, *changes):
    file = write("ppo", environments={name: {**each, "max_tokens": 2048} for name, each in SOURCES.items()})
    return episode_kind(load(PPOConfig, file, [f"--{change}" for change in changes]))
