"""What follows from the choice of an estimator: defaults, and whether a critic takes part."""

from pathlib import Path

import pytest
import yaml

from rlhf_ray.config.algorithm import COMMAND_OF, AlgorithmConfig, KLConfig, method_in_words
from rlhf_ray.config.derived import derive, placements_of
from rlhf_ray.config.estimators import ESTIMATORS, METHODS
from rlhf_ray.config.fields import describe_fields, type_tag
from rlhf_ray.config.load import COMMANDS, STARTED_WITH, as_yaml, load
from rlhf_ray.config.losses import ClipLoss
from rlhf_ray.config.rewards import NumberReward
from rlhf_ray.config.stages import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
from rlhf_ray.config.training_loop import CoordinatorConfig
from rlhf_ray.errors import ConfigError

ALONE, GROUPS = ("reinforce", "reinforce_pp"), ("reinforce_baseline", "rloo", "grpo", "dr_grpo", "gdpo")


@pytest.mark.parametrize("estimator", ["gae", *ALONE, *GROUPS])
def test_defaults_follow_the_estimator(estimator):
    a = AlgorithmConfig(estimator=estimator)
    assert (a.kl.placement, a.kl.estimator) == (("loss", "k3") if estimator in GROUPS else ("reward", "k1"))
    assert a.kl_in_loss is (estimator in GROUPS)
    assert a.whitens is (estimator in ("gae", "reinforce_pp", "gdpo"))
    assert a.has_critic is (estimator == "gae") and a.compares_groups is (estimator in GROUPS)


@pytest.mark.parametrize("kl", [{"placement": "reward"}, KLConfig(placement="reward")])
def test_what_is_said_wins_over_what_follows(kl):
    a = AlgorithmConfig(estimator={"type": "rloo", "whiten": True}, kl=kl)
    assert (a.kl.placement, a.kl.estimator, a.whitens) == ("reward", "k1", True)
    assert AlgorithmConfig(kl={"placement": "loss", "estimator": "k2"}).kl.estimator == "k2"


def test_the_saved_configuration_names_what_followed(write, tmp_path):
    config = load(PPOConfig, write("ppo"), ["--algorithm.estimator=grpo", "--coordinator.samples_per_prompt=4"])
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())["algorithm"]
    assert (saved["kl"]["placement"], saved["kl"]["estimator"]) == ("loss", "k3")
    assert saved["estimator"] == {"type": "grpo", "whiten": False}
    assert load(PPOConfig, tmp_path / "saved.yaml", []) == config


def test_a_critic_that_is_not_started_asks_for_nothing(write):
    room = "--pools.default.cpus=0.45"  # for all but a critic
    config = load(PPOConfig, write("ppo"), [room, "--algorithm.estimator=reinforce"])
    assert "critic" not in placements_of(config)
    with pytest.raises(ConfigError, match="critic 1x0.1"):
        load(PPOConfig, write("ppo"), [room])
    assert "critic" in placements_of(load(PPOConfig, write("ppo"), []))


NAMED = ("grpo", "rloo", "reinforce")


class TestCommands:
    """`rlhf-ray grpo|rloo|reinforce`: the stage `ppo` with other defaults."""

    @pytest.mark.parametrize(("command", "samples", "coef"), [
        ("grpo", 8, 0.0), ("rloo", 4, 0.05), ("reinforce", 1, 0.05)])
    def test_the_command_sets_the_defaults_of_its_estimator(self, command, samples, coef, write):
        config = load(COMMANDS[command], write("ppo"), [])
        a = config.algorithm
        assert (a.estimator.type, a.epochs, a.kl.coef) == (command, 1, coef)
        assert config.coordinator.samples_per_prompt == samples
        by_estimator = AlgorithmConfig(estimator=command)
        assert (a.kl.placement, a.kl.estimator, a.whitens) == (
            by_estimator.kl.placement, by_estimator.kl.estimator, by_estimator.whitens)
        assert derive(config).starts_reference is (command != "grpo") and not derive(config).starts_critic

    @pytest.mark.parametrize(("estimator", "samples"), [
        ("gae", 1), ("reinforce", 1), ("reinforce_pp", 1), ("rloo", 4),
        *((name, 8) for name in GROUPS if name != "rloo")])
    def test_ppo_samples_the_groups_that_its_estimator_compares(self, estimator, samples, write):
        chosen = f"--algorithm.estimator={estimator}"
        config = load(PPOConfig, write("ppo"), [chosen])
        assert config.coordinator.samples_per_prompt == samples
        assert load(PPOConfig, write("ppo", coordinator={"samples_per_prompt": 16}), [chosen, "--generator.chunk=16"]
                    ).coordinator.samples_per_prompt == 16
        preset = load(PPOConfig, write("ppo"), ["--algorithm.estimator=grpo", "--algorithm.preset=dapo"])
        assert preset.coordinator.samples_per_prompt == 16, "the preset's"
        rest = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": {"r": NumberReward(type="number")}}
        made = PPOConfig(**rest, algorithm=AlgorithmConfig(estimator=estimator), coordinator=CoordinatorConfig())
        assert made.coordinator.samples_per_prompt == samples, "in Python"

    @pytest.mark.parametrize("command", NAMED)
    def test_only_the_fields_that_a_resume_keeps_have_other_defaults(self, command):
        usual = {f.path: f.default for f in describe_fields(PPOConfig)}
        others = {f.path for f in describe_fields(COMMANDS[command]) if usual[f.path] != f.default}
        follow = {"algorithm.estimator.whiten", "algorithm.kl.placement", "algorithm.kl.estimator"}  # the estimator
        assert others - follow <= {".".join(keys).removesuffix(".type") for keys in STARTED_WITH}

    def test_what_the_user_sets_wins_wherever_it_is_set(self, write, monkeypatch):
        path = write("ppo", algorithm={"kl": {"coef": 0.04}, "epochs": 3}, coordinator={"prompts_per_step": 16})
        monkeypatch.setenv("RLHF_RAY_COORDINATOR__SAMPLES_PER_PROMPT", "2")
        config = load(GRPOConfig, path, ["--algorithm.epochs=2", "--algorithm.mini_batches=1"])
        a, loop = config.algorithm, config.coordinator
        assert (a.kl.coef, a.kl.estimator, a.epochs, loop.prompts_per_step, loop.samples_per_prompt) == (
            0.04, "k3", 2, 16, 2)
        assert load(GRPOConfig, write("ppo", algorithm={"estimator": "grpo"}), []).algorithm.epochs == 1

    @pytest.mark.parametrize(("command", "estimator", "instead"), [
        ("grpo", "rloo", "`rlhf-ray rloo`"), ("rloo", "gae", "`rlhf-ray ppo`"),
        ("reinforce", "reinforce_pp", "`rlhf-ray ppo`, which takes them all"), ("grpo", "dr_grpo", "takes them all")])
    def test_another_estimator_is_an_error_that_names_both(self, command, estimator, instead, write):
        path = write("ppo", algorithm={"epochs": 1, "estimator": estimator})
        line = path.read_text().splitlines().index(f"  estimator: {estimator}") + 1
        with pytest.raises(ConfigError) as caught:
            load(COMMANDS[command], path, [])
        for words in (f"estimator={estimator}", f"`rlhf-ray {command}`", instead, f"[{path}:{line}]"):
            assert words in str(caught.value)
        with pytest.raises(ConfigError, match=rf"contradicts `rlhf-ray {command}`.*\[--algorithm.estimator\]"):
            load(COMMANDS[command], write("ppo"), [f"--algorithm.estimator={estimator}"])

    def test_a_word_that_is_no_estimator_is_explained_as_such(self, write):
        with pytest.raises(ConfigError, match="algorithm.estimator.type='gpro': must be one of grpo"):
            load(GRPOConfig, write("ppo"), ["--algorithm.estimator=gpro"])

    @pytest.mark.parametrize("command", NAMED)
    def test_the_saved_configuration_is_read_by_either_command(self, command, write, tmp_path):
        config = load(COMMANDS[command], write("ppo"), [])
        (tmp_path / "config.yaml").write_text(as_yaml(config))
        assert load(COMMANDS[command], tmp_path / "config.yaml", []) == config
        assert load(PPOConfig, tmp_path / "config.yaml", []).model_dump() == config.model_dump()

    def test_sections_of_the_stage_are_taken_with_the_commands_defaults(self):
        rest = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": {"r": NumberReward(type="number")}}
        algorithm = AlgorithmConfig(estimator="grpo", loss=ClipLoss(clip_high=0.28), kl=KLConfig(kind="fixed"))
        config = GRPOConfig(**rest, coordinator=CoordinatorConfig(prompts_per_step=4), algorithm=algorithm)
        assert (config.coordinator.prompts_per_step, config.coordinator.samples_per_prompt) == (4, 8)
        assert (config.algorithm.loss.clip_high, config.algorithm.epochs, config.algorithm.kl.coef) == (0.28, 1, 0)
        with pytest.raises(ConfigError, match="estimator=gae contradicts"):
            GRPOConfig(**rest, algorithm=AlgorithmConfig(epochs=2))


class TestResume:
    """`--resume` goes on with the defaults that the run was started with, whichever command it is given to."""

    @pytest.fixture
    def run(self, write, tmp_path):
        """run(class, overrides) -> the file of a run with a checkpoint, and the configuration that it was started
        with."""

        def start(cls, *overrides, **sections) -> tuple[Path, PPOConfig]:
            path = write("ppo", run={"dir": str(tmp_path / "run")}, **sections)
            config = load(cls, path, list(overrides))
            (tmp_path / "run" / "checkpoints" / "step_2").mkdir(parents=True)
            (tmp_path / "run" / "config.yaml").write_text(as_yaml(config))
            return path, config

        return start

    @pytest.mark.parametrize("cls", [GRPOConfig, RLOOConfig, ReinforceConfig])
    def test_ppo_resumes_what_another_command_started(self, cls, run):
        path, config = run(cls)
        assert load(PPOConfig, path, [], resume=True).model_dump() == config.model_dump()
        assert load(cls, path, [], resume=True) == config
        assert load(PPOConfig, path, []).algorithm.estimator.type == "gae", "a new run"

    @pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
    def test_the_samples_of_a_group_are_those_of_the_run(self, estimator, run):
        chosen = f"--algorithm.estimator={estimator}"
        path, _ = run(PPOConfig, chosen, "--coordinator.samples_per_prompt=16")
        assert load(PPOConfig, path, [chosen], resume=True).coordinator.samples_per_prompt == 16

    def test_a_command_resumes_what_ppo_started(self, run):
        path, config = run(PPOConfig, coordinator={"samples_per_prompt": 4}, algorithm={"estimator": "grpo"})
        resumed = load(GRPOConfig, path, [], resume=True)
        assert resumed.model_dump() == config.model_dump() and resumed.algorithm.epochs == 2

    def test_what_is_set_now_wins(self, run):
        path, _ = run(GRPOConfig)
        resumed = load(PPOConfig, path, ["--algorithm.epochs=4"], resume=True).algorithm
        assert (resumed.epochs, resumed.kl.coef, resumed.estimator.type) == (4, 0, "grpo")

    def test_another_estimator_that_is_set_now_has_its_own_defaults(self, run):
        path, _ = run(GRPOConfig)
        resumed = load(PPOConfig, path, ["--algorithm.estimator=gae"], resume=True)
        assert resumed.model_dump() == load(PPOConfig, path, []).model_dump()

    def test_a_preset_of_another_estimator_that_is_set_now_has_its_own_defaults(self, run):
        path, _ = run(GRPOConfig)
        now = ["--algorithm.preset=rloo", "--generator.chunk=4"]
        assert load(PPOConfig, path, now, resume=True).model_dump() == load(PPOConfig, path, now).model_dump()

    @pytest.mark.parametrize("estimator", [{"type": "grpo", "whiten": True}, {"whiten": True}])
    def test_a_field_of_the_same_estimator_leaves_the_other_defaults(self, estimator, run, write):
        path, _ = run(GRPOConfig)
        resumed = load(PPOConfig, path, [f"--algorithm.estimator={estimator}"], resume=True).algorithm
        assert (resumed.estimator.type, resumed.whitens, resumed.epochs, resumed.kl.coef) == ("grpo", True, 1, 0)

    def test_a_run_of_another_estimator_is_refused(self, run, tmp_path):
        path, _ = run(PPOConfig)
        refusal = rf"estimator=gae contradicts `rlhf-ray grpo`.*\[{tmp_path}/run/config.yaml:"
        with pytest.raises(ConfigError, match=refusal):
            load(GRPOConfig, path, [], resume=True)

    def test_a_run_without_a_checkpoint_begins_anew(self, run, tmp_path):
        path, _ = run(GRPOConfig)
        (tmp_path / "run" / "checkpoints" / "step_2").rmdir()
        assert load(PPOConfig, path, [], resume=True) == load(PPOConfig, path, [])


def test_every_estimator_has_a_name():
    assert METHODS.keys() == set(map(type_tag, ESTIMATORS)) and COMMAND_OF.keys() <= METHODS.keys()


@pytest.mark.parametrize(("values", "words"), [
    ({"algorithm": {"estimator": "grpo"}, "rewards": {"r": {"type": "function"}}}, "GRPO"),
    ({"algorithm": {"estimator": "dr_grpo"}, "rewards": {"r": {"type": "model"}}}, "Dr. GRPO from human feedback"),
    ({"algorithm": {"estimator": "gae"}, "rewards": {"r": {"type": "exact_match"}}}, "PPO"),
    ({"algorithm": {"estimator": "gae"}, "rewards": {"r": {"type": "model"}}}, "PPO from human feedback"),
    ({}, "PPO from human feedback"), ({"algorithm": "?", "rewards": None}, "PPO from human feedback")])
def test_a_run_is_named_by_its_estimator_and_rewards(values, words):
    assert method_in_words(values) == words
