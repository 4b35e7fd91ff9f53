"""Where values come from, who wins, and that a saved configuration is whole."""


import pytest
import yaml

from rlhf_ray.config.load import STAGES, as_yaml, load, resolve
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.settled import is_set
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.errors import ConfigError


def test_command_line_wins_over_environment_over_file_over_default(write, monkeypatch):
    path = write("ppo", run={"steps": 1, "seed": 1, "dir": "from/file"})
    monkeypatch.setenv("RLHF_RAY_RUN__STEPS", "2")
    monkeypatch.setenv("RLHF_RAY_RUN__SEED", "2")
    config = load(PPOConfig, path, ["--run.steps=3"])
    assert (config.run.steps, config.run.seed, config.run.dir) == (3, 2, "from/file")
    assert config.checkpoint.keep == 2


@pytest.mark.parametrize("overrides", [["--run.steps=7"], ["--run.steps", "7"], ["--run.steps=1", "--run.steps=7"]])
def test_both_spellings_of_an_override_and_the_last_one_counts(write, overrides):
    assert load(PPOConfig, write("ppo"), overrides).run.steps == 7


def test_overrides_of_every_kind_of_value(write):
    config = load(
        PPOConfig,
        write("ppo", evaluation={"prompts": "e.jsonl"}, generator={"kv_cache_mb": 128}),
        [
            "--policy.zero_stage=3",
            "--policy.gradient_checkpointing=true",
            "--policy.optimizer.betas=[0.8, 0.9]",
            "--policy.optimizer.learning_rate=3e-5",
            "--generator.kv_cache_mb=null",
            "--run.dir=123",
            "--evaluation=null",
            "--pools.default.cpus=4",
            "--pools.spare.bundles=2",
            "--critic.pool=spare",
            "--algorithm.kl.kind=adaptive",
        ],
    )
    assert config.policy.zero_stage == 3
    assert config.policy.gradient_checkpointing is True
    assert config.policy.optimizer.betas == (0.8, 0.9)
    assert config.policy.optimizer.learning_rate == 3e-5
    assert config.generator.kv_cache_mb == 64, "what empty means on a CPU"
    assert config.run.dir == "123"
    assert config.evaluation is None
    assert {name: (p.cpus, p.bundles) for name, p in config.pools.items()} == {"default": (4, 1), "spare": (1, 2)}
    assert config.algorithm.kl.kind == "adaptive"


@pytest.mark.parametrize("given", ["auto", None])
def test_automatic_micro_batches_count_as_not_set(write, given):
    path = write("ppo", policy={"micro_batch_tokens": 8192}, critic={"micro_batch_tokens": given})
    config = load(PPOConfig, path, [f"--policy.micro_batch_tokens={given or 'null'}"])
    for role in ("policy", "critic"):
        assert getattr(config, role).micro_batch_tokens == 4096
        assert not is_set(config, f"{role}.micro_batch_tokens")
    with pytest.raises(ConfigError, match="policy.micro_batch_tokens='automatic': must be a whole number"):
        load(PPOConfig, path, ["--policy.micro_batch_tokens=automatic"])


def test_automatic_micro_batches_on_gpus_hold_the_longest_row(write):
    long = ["--prompts.max_tokens=3000", "--generator.sampling.max_tokens=3000", "--reference.micro_batch_tokens=6000"]
    placed = ["--pools.default.gpus=1", "--policy.gpus=1", "--critic.micro_batch_tokens=6000"]
    config = load(PPOConfig, write("ppo"), [*long, *placed])
    assert config.policy.micro_batch_tokens == resolve(config).policy.micro_batch_tokens == 6000
    assert not is_set(config, "policy.micro_batch_tokens")
    with pytest.raises(ConfigError, match="policy.micro_batch_tokens=4096 is less than the longest sample"):
        load(PPOConfig, write("ppo"), long)


@pytest.mark.parametrize(("text", "share"), [
    ("true", True), ("false", False), ("0.5", 0.5), ("1", 1), ("0", 0), ("1.0", 1.0), ("2.5e-1", 0.25)])
def test_a_share_of_layers_is_a_truth_value_or_a_number(write, text, share):
    given = load(PPOConfig, write("ppo"), [f"--policy.gradient_checkpointing={text}"]).policy
    read = load(PPOConfig, write("ppo", policy={"gradient_checkpointing": yaml.safe_load(text)}), []).policy
    assert given.gradient_checkpointing == read.gradient_checkpointing == share


@pytest.mark.parametrize("text", ["1.5", "-0.1", ".nan", ".inf", "half", "50%", "null", "[0.5]"])
def test_what_is_no_share_of_layers_is_refused(write, text):
    for given, arguments in ((yaml.safe_load(text), []), (False, [f"--policy.gradient_checkpointing={text}"])):
        path = write("ppo", policy={"gradient_checkpointing": given})
        with pytest.raises(ConfigError, match=r"policy.gradient_checkpointing: gradient_checkpointing=.* must be true, "
                                              r"false, or the share of layers to recompute, from 0 to 1 \["):
            load(PPOConfig, path, arguments)


def test_every_literal_of_every_stage_can_be_given_as_text():
    """A number in a Literal would refuse the command line's text; such fields are bounded integers instead."""
    from rlhf_ray.config.fields import sections_of

    def literals(cls, seen):
        for field in cls.model_fields.values():
            for member in sections_of(field.annotation):
                if member not in seen:
                    yield from literals(member, seen | {member})
            yield from getattr(field.annotation, "__args__", ())

    for cls in STAGES.values():
        assert not [a for a in literals(cls, frozenset()) if isinstance(a, int) and not isinstance(a, bool)]


def test_environment_gives_lists_and_empties(write, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_POLICY__OPTIMIZER__BETAS", "[0.8, 0.9]")
    monkeypatch.setenv("RLHF_RAY_GENERATOR__KV_CACHE_MB", "null")
    config = load(PPOConfig, write("ppo", generator={"kv_cache_mb": 128}), [])
    assert config.policy.optimizer.betas == (0.8, 0.9)
    assert config.generator.kv_cache_mb == 64, "what empty means on a CPU"


def test_a_variable_gives_a_whole_section_and_others_its_keys(write, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_RUN", '{"steps": 3, "seed": 4}')
    monkeypatch.setenv("rlhf_ray_run__seed", "5")
    config = load(PPOConfig, write("ppo"), [])
    assert (config.run.steps, config.run.seed) == (3, 5)


def test_a_variable_of_another_stage_is_left_alone_and_one_of_no_stage_refused(write, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_COORDINATOR__MAX_STALENESS", "1")
    load(SFTConfig, write("sft"), [])
    monkeypatch.setenv("RLHF_RAY_CORDINATOR__MAX_STALENESS", "1")
    with pytest.raises(ConfigError, match="RLHF_RAY_CORDINATOR__MAX_STALENESS.*did you mean coordinator"):
        load(SFTConfig, write("sft"), [])


def test_the_environment_is_read_by_load_alone(monkeypatch):
    monkeypatch.setenv("RLHF_RAY_RUN__STEPS", "5")
    assert SFTConfig(model={"path": "m"}, data={"path": "d"}).run.steps == 100


def test_a_configuration_without_a_file():
    config = load(SFTConfig, None, ["--model.path=m", "--data.path=d"])
    assert config.model == ModelConfig(path="m")
    assert type(config) is SFTConfig


class TestModelOrArchitecture:
    def test_a_path(self, write):
        config = load(SFTConfig, write("sft"), ["--model.path=x", "--model.dtype=bfloat16"])
        assert config.model == ModelConfig(path="x", dtype="bfloat16")

    def test_an_architecture(self, write):
        path = write("sft", model={"architecture": {"layers": 4, "heads": 2}, "tokenizer": "t"})
        config = load(SFTConfig, path, ["--model.architecture.layers=2"])
        assert isinstance(config.model, NewModelConfig)
        assert (config.model.architecture.layers, config.model.architecture.heads) == (2, 2)

    def test_a_path_on_the_command_line_replaces_the_files_architecture(self, write):
        path = write("sft", model={"architecture": {"layers": 4}, "tokenizer": "t"})
        assert load(SFTConfig, path, ["--model.path=x"]).model == ModelConfig(path="x", tokenizer="t")

    def test_a_path_on_the_command_line_replaces_the_environments_architecture(self, write, monkeypatch):
        monkeypatch.setenv("RLHF_RAY_MODEL__ARCHITECTURE__LAYERS", "3")
        assert load(SFTConfig, write("sft"), ["--model.path=x"]).model == ModelConfig(path="x")

    @pytest.mark.parametrize("model", [{"path": "x", "architecture": {}}, {"tokenizer": "t"}, "x"])
    def test_neither_fits(self, write, model):
        path = write("sft", model=model)
        with pytest.raises(ConfigError) as caught:
            load(SFTConfig, path, [])
        assert str(caught.value).splitlines()[1:] == [
            f"  model={model!r}: needs the keys path, or architecture and tokenizer, not both [{path}:1]"]

    def test_a_key_of_the_other_one(self, write):
        path = write("sft", model={"architecture": {}, "tokenizer": "t"})
        with pytest.raises(ConfigError, match="model.revision: unknown key; it does not go with the other keys of mod"):
            load(SFTConfig, path, ["--model.architecture.layers=2", "--model.revision=main"])

    def test_an_error_inside_the_chosen_one_speaks_of_that_one_alone(self, write):
        path = write("sft", model={"architecture": {"layers": 0}, "tokenizer": "t"})
        with pytest.raises(ConfigError) as caught:
            load(SFTConfig, path, [])
        assert str(caught.value).splitlines()[1:] == [f"  model.architecture.layers=0: must be at least 1 [{path}:3]"]


class TestResolve:
    def test_empty_capacities_are_settled(self, write):
        path = write("ppo", coordinator={"prompts_per_step": 6, "samples_per_prompt": 4, "max_staleness": 2},
                     generator={"chunk": 8})
        config = load(PPOConfig, path, ["--cluster.object_store_mb=300"])
        assert config.coordinator.samples_ahead == 3 * 6 * 4
        assert config.buffer.capacity_mb == 150

    def test_given_capacities_stay(self, write):
        config = load(PPOConfig, write("ppo", buffer={"capacity_mb": 7}), [])
        assert config.buffer.capacity_mb == 7

    def test_twice_is_once(self, write):
        config = load(PPOConfig, write("ppo"), [])
        assert resolve(config) == config

    @pytest.mark.parametrize(("gpus", "settled"), [(0, 64), (1, None)])
    def test_an_empty_cache_is_a_small_one_on_cpus_and_what_is_left_on_gpus(self, write, gpus, settled):
        path = write("ppo", pools={"default": {"gpus": gpus, "cpus": 8}}, generator={"gpus": gpus})
        assert load(PPOConfig, path, []).generator.kv_cache_mb == settled
        assert load(PPOConfig, path, ["--generator.kv_cache_mb=256"]).generator.kv_cache_mb == 256

    def test_nothing_is_left_empty_that_follows_from_others(self, write):
        config = load(PPOConfig, write("ppo"), [])
        assert None not in config.buffer.model_dump().values()


class TestAsYaml:
    @pytest.mark.parametrize("command", sorted(STAGES))
    def test_what_is_saved_loads_to_the_same(self, command, write, tmp_path):
        config = load(STAGES[command], write(command), ["--run.seed=9", "--pools.default.labels={zone: a}"])
        (tmp_path / "config.yaml").write_text(as_yaml(config))
        assert load(STAGES[command], tmp_path / "config.yaml", []) == config

    def test_relative_paths_are_saved_as_written(self, write, tmp_path, monkeypatch):
        path = write("ppo", run={"dir": "runs/here"})
        monkeypatch.chdir(tmp_path)
        saved = yaml.safe_load(as_yaml(load(PPOConfig, path, ["--model.path=../model"])))
        assert (saved["run"]["dir"], saved["model"]["path"]) == ("runs/here", "../model")


@pytest.mark.parametrize("given, value", [("off", "off"), ("false", "off"), ('"off"', "off"), ("all", "all"), ("3", 3)])
def test_samples_are_all_a_number_of_prompts_or_off(given, value, write, tmp_path):
    """YAML reads an unquoted `off` as false. The value comes back from the saved configuration."""
    path = write("ppo")
    with open(path, "a") as file:
        file.write(f"logging:\n  samples: {given}\n")
    config = load(PPOConfig, path, [])
    assert config.logging.samples == value and type(config.logging.samples) is type(value)
    assert load(PPOConfig, path, [f"--logging.samples={value}"]).logging.samples == value
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert load(PPOConfig, tmp_path / "saved.yaml", []).logging.samples == value


@pytest.mark.parametrize("given", ["0", "-1", "true", "1.5", "some", "null", "[]"])
def test_other_samples_are_refused_with_what_they_may_be(given, write):
    with pytest.raises(ConfigError, match=r"logging.samples: .* is none of all, off, and a number"):
        load(PPOConfig, write("ppo"), [f"--logging.samples={given}"])
