"""Combinations that cannot work are refused before anything starts, with the numbers and the fix."""

import numpy as np
import pytest

from rlhf_ray.config import combination_checks
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.combination_checks import BYTES_PER_TOKEN, BYTES_PER_VALUE, CHECKS
from rlhf_ray.config.derived import placements_of
from rlhf_ray.config.load import STAGES, load
from rlhf_ray.config.stages import EvaluateConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.records import Experience, SampleKey


@pytest.mark.parametrize(
    ("command", "overrides", "words"),
    [
        ("ppo", ["--algorithm.mini_batches=3"], ["128 x 1 = 128", "algorithm.mini_batches=3"]),
        ("ppo", ["--coordinator.samples_per_prompt=3", "--algorithm.mini_batches=1"], ["generator.chunk=16", "=3"]),
        ("ppo", ["--buffer.capacity_mb=2"],
         ["buffer.capacity_mb=2", "128 samples of up to 768 tokens", "4 MiB", "lower coordinator.prompts_per_step"]),
        ("ppo", ["--coordinator.prompts_per_step=16384"],
         ["half of cluster.object_store_mb=256", "396 MiB"]),
        ("ppo", ["--coordinator.concurrency=15"], ["coordinator.concurrency=15", "generator.chunk=16"]),
        ("ppo", ["--coordinator.concurrency=0"], ["coordinator.concurrency"]),
        ("ppo", ["--pools.default.bundles=2", "--generator.workers=3", "--generator.cpus=0.6", "--policy.cpus=0",
                 "--critic.cpus=0", "--reference.cpus=0", "--reward.cpus=0", "--assembler.cpus=0"],
         ["its 2 bundles of 1 cpus", "fits into no single bundle", "generator with 0.6 cpus"]),
        ("ppo", ["--policy.micro_batch_tokens=700"], ["policy.micro_batch_tokens=700", "768"]),
        ("ppo", ["--critic.micro_batch_tokens=700"], ["critic.micro_batch_tokens=700", "768"]),
        ("ppo", ["--policy.workers=64", "--policy.cpus=0"], ["policy.workers=64", "32 samples"]),
        ("ppo", ["--policy.gpus=1"], ["policy.gpus=1 is more than a bundle of pools.default has (0)"]),
        ("ppo", ["--pools.default.gpus=1", "--policy.gpus=1", "--policy.workers=2"],
         ["pools.default has 1 gpus", "need 2", "policy 2x1"]),
        ("ppo", ["--policy.gpus=2", "--pools.default.gpus=2"],
         ["policy.gpus=2", "uses one GPU; for several set policy.workers"]),
        ("ppo", ["--generator.gpus=2"], ["tensor_parallel=1", "1 whole gpus per worker, not 2"]),
        ("ppo", ["--generator.gpus=1.5"], ["tensor_parallel=1", "1 whole gpus per worker, not 1.5"]),
        ("sft", ["--learner.optimizer.betas=[0.9, 1.0]"], ["betas=[0.9, 1.0] must be at least 0 and less than 1"]),
        ("ppo", ["--algorithm.kl={placement: loss, estimator: k1, unbiased: false}"], ["estimator=k1", "use k3"]),
        ("sft", ["--checkpoint.best_metric=loss", "--data.held_out=0"], ["best_metric=loss", "data.held_out=0"]),
        ("sft", ["--checkpoint.best_metric=accuracy", "--data.held_out=0.1"], ["best_metric=accuracy", "one of loss"]),
        ("reward-model", ["--checkpoint.best_metric=acuracy", "--data.held_out=0.1"],
         ["name one of accuracy, loss, margin, score"]),
        ("ppo", ["--checkpoint.best_metric=gold", "--evaluation.prompts=e.jsonl"],
         ["best_metric=gold", "logging.judge",
          "name one of distinct, distinct_bigrams, finished, kl, length, perplexity, responses"]),
        ("ppo", ["--evaluation.prompts=e.jsonl", "--evaluation.samples_per_prompt=4", "--evaluation.sampling.top_k=1"],
         ["evaluation.samples_per_prompt=4 with evaluation.sampling.top_k=1", "same response"]),
        ("ppo", ["--evaluation.prompts=e.jsonl", "--evaluation.samples_per_prompt=4",
                 "--evaluation.sampling.temperature=0"], ["evaluation.sampling.temperature=0"]),
        ("ppo", ["--evaluation.prompts=e.jsonl", f"--generator.sampling.stop_token_ids={list(range(130))}",
                 "--evaluation.sampling.min_tokens=4"], ["evaluation.sampling", "130 tokens"]),
        ("ppo", ["--reference.micro_batch_tokens=100"], ["reference.micro_batch_tokens=100", "longest sample"]),
        ("ppo", ["--algorithm.critic_warmup_steps=100"], ["algorithm.critic_warmup_steps=100", "run.steps=100"]),
        ("ppo", ["--algorithm.kl.kind=adaptive", "--algorithm.kl.horizon=20"], ["algorithm.kl.horizon=20"]),
        *(("ppo", ["--algorithm.estimator=gdpo", "--coordinator.samples_per_prompt=4", f"--algorithm.{option}"],
           ["estimator=gdpo compares each reward by itself", f"algorithm.{option.split('=')[0]}", remedy])
          for option, remedy in (
              ("reward_normalisation=scale", "leave it out, or use estimator=grpo"), ("reward_clip=5", "leave it out"),
              ("missing_eos_penalty=1", "give a reward of `rewards` for it"), ("overlong_buffer=8", "give a reward"),
              ("kl.placement=reward", "set algorithm.kl.placement=loss"))),
        ("ppo", ["--coordinator.max_staleness=1", "--generator.chunk=24"], ["multiple of generator.chunk=24"]),
        ("ppo", ["--policy.lora.targets=[all-linear, q_proj]"], ["['all-linear', 'q_proj']", "keep one"]),
        ("ppo", ["--policy.lora.targets=[]"], ["policy.lora.targets=[]"]),
        ("ppo", ["--policy.lora.rank=0"], ["policy.lora.rank=", "at least 1"]),
        ("ppo", ["--policy.offload_optimizer=true"], ["offload_optimizer", "gpus=0"]),
        ("ppo", ["--generator.tensor_parallel=2", "--generator.gpus=1", "--pools.default.gpus=1"],
         ["tensor_parallel=2", "2 whole gpus", "set gpus to 2"]),
        ("ppo", ["--generator.workers=20"], ["pools.default has 1 cpus", "generator 20x0.1"]),
        ("ppo", ["--generator.pool=gpus"], ["generator.pool='gpus'", "['default']"]),
        ("ppo", ["--generator.sampling.temperature=0"], ["generator.sampling.temperature=0", "positive"]),
        ("preferences", ["--generator.sampling.temperature=0"], ["generator.sampling.temperature=0", "positive"]),
        ("ppo", ["--generator.sampling.temperature=0.001"], ["temperature=0.001", "at least 0.01"]),
        ("ppo", ["--pools.default.gpus=1", "--policy.workers=2", "--policy.gpus=0.2"],
         ["2 ranks of policy", "policy.gpus=0.2", "NCCL refuses"]),
        ("ppo", ["--pools.default.gpus=1", "--generator.workers=2", "--generator.gpus=0.2"],
         ["2 generators", "generator.gpus=0.2", "set generator.kv_cache_mb"]),
        ("ppo", ["--generator.sampling.top_k=1"], ["generator.sampling.top_k=1 is greedy", "no gradient"]),
        ("ppo", ["--generator.sampling.top_k=50", "--generator.sampling.min_p=1"], ["sampling.min_p=1 is greedy"]),
        ("preferences", ["--generator.sampling.top_k=1"], ["sampling.top_k=1 is greedy", "same response twice"]),
        ("ppo", ["--algorithm.target_kl=0.1", "--algorithm.old_logprobs=generator", "--coordinator.max_staleness=1",
                 "--algorithm.epochs=2"], ["target_kl=0.1", "coordinator.max_staleness=1", "old_logprobs to policy"]),
        ("ppo", ["--generator.sampling.temperature=3"], ["generator.sampling.temperature", "2"]),
        ("ppo", ["--generator.sampling.min_p=1.5"], ["generator.sampling.min_p", "1"]),
        ("ppo", ["--generator.sampling.min_tokens=300"], ["min_tokens=300", "max_tokens=256"]),
        ("ppo", ["--generator.sampling.min_tokens=3", f"--generator.sampling.stop_token_ids={list(range(2, 123))}"],
         ["stop_token_ids has 121 tokens", "at most 120"]),
        ("ppo", ["--generator.vllm.max_num_batched_tokens=500"],
         ["generator.vllm.max_num_batched_tokens=500", "768 tokens, which a generator on a CPU computes in one pass"]),
        ("preferences", ["--generator.vllm.max_num_batched_tokens=300"], ["=300 is less than a prompt and"]),
        ("ppo", ["--generator.sampling.stop=['']"], ["generator.sampling: stop=['']", "empty text"]),
        ("ppo", ["--generator.sampling.stop_token_ids=[3, -1]"], ["stop_token_ids=[3, -1]", "negative"]),
        ("ppo", ["--generator.sampling.repetition_penalty=1.1"], ["generator.sampling.repetition_penalty=1.1"]),
        ("ppo", ["--generator.sampling.top_p=0.9"], ["generator.sampling.top_p=0.9", "generator.sampling.top_k"]),
        ("ppo", ["--generator.sampling.min_p=0.1"], ["generator.sampling.min_p=0.1", "generator.sampling.top_k"]),
        ("ppo", ["--generator.sampling.min_tokens=9", "--evaluation.sampling.max_tokens=8", "--prompts.held_out=0.1"],
         ["evaluation.sampling", "min_tokens=9 is more than max_tokens=8"]),
        ("ppo", ["--generator.sampling.top_k=100", "--buffer.capacity_mb=15"],
         ["buffer.capacity_mb=15 may not hold one batch", "are 16 MiB"]),
        ("ppo", ["--generator.tensor_parallel=2", "--generator.engine=in_process"], ["engine=async"]),
        ("ppo", ["--algorithm.kl.kind=adaptive", "--algorithm.kl.coef=0"], ["kl.coef=0"]),
        *(("ppo", [f"--algorithm.estimator={estimator}", "--coordinator.samples_per_prompt=1"],
           [f"estimator={estimator}", "samples_per_prompt=1", "raise it to at least 2"])
          for estimator in ("grpo", "rloo", "dr_grpo", "reinforce_baseline")),
        ("ppo", ["--critic.backbone=policy", "--critic.init=reward"],
         ["critic.init=reward", "or critic.backbone to own"]),
        ("ppo", ["--critic.backbone=policy", "--algorithm.critic_warmup_steps=3"], ["critic_warmup_steps=3", "to 0"]),
        ("ppo", ["--critic.backbone=policy", "--critic.path=c"], ["critic.path=c", "or critic.backbone to own"]),
        ("ppo", ["--critic.init=reward", "--critic.path=c"], ["path='c' and init=reward", "leave path empty"]),
        ("ppo", ["--reference.shards=2", "--reference.workers=3"], ["workers=3 is not a multiple of shards=2", "4"]),
        ("ppo", ["--reward.shards=2", "--reward.workers=2", "--reward.gpus=0.5"], ["shards=2", "gpus=0.5", "to 1"]),
        ("ppo", ["--reference.revision=main"], ["revision='main' without path", "set path"]),
        ("ppo", ["--rewards.main.weight=0"], ["the weight of each of main is 0"]),
        ("ppo", ["--prompts.held_out=0.1"], ["prompts.held_out=0.1", "add one, e.g. evaluation.every=10"]),
        ("ppo", ["--prompts.held_out=0.1", "--evaluation.prompts=e.jsonl"], ["'e.jsonl'; leave that empty"]),
        ("ppo", ["--prompts.held_out=0.1", "--checkpoint.best_metric=gold"], ["add one, e.g. evaluation.every=10"]),
        ("ppo", ["--checkpoint.best_metric=gold"],
         ["best_metric=gold", "there is no evaluation", "prompts.held_out=0.01"]),
        ("preferences", ["--prompts.held_out=0.1"], ["prompts.held_out=0.1", "set it to 0"]),
        ("ppo", ["--ptx.path=t", "--ptx.max_tokens=5000"], ["policy.micro_batch_tokens=4096", "ptx.max_tokens=5000"]),
        ("ppo", ["--policy.ema_decay=1"], ["policy.ema_decay", "less than 1"]),
        ("ppo", ["--algorithm.overlong_buffer=257"], ["overlong_buffer=257", "max_tokens=256"]),
        ("ppo", ["--model.trust_remote_code=true"], ["revision"]),
        ("sft", ["--model.architecture.heads=3", "--model.tokenizer=t"], ["hidden_size=128", "heads=3"]),
        ("sft", ["--model.architecture.hidden_size=20", "--model.tokenizer=t"],
         ["hidden_size=20 / heads=4 = 5 is odd"]),
        ("sft", ["--model.architecture.kv_heads=3", "--model.tokenizer=t"], ["heads=4", "kv_heads=3"]),
    ],
)
def test_refused(write, command, overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(STAGES[command], write(command), overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("bound", "acts"), [("max_ratio=0.5", True), ("max_ratio=4", False), ("min_ratio=0.5", False)])
def test_a_bound_that_cuts_the_ratio_of_the_first_step_acts(write, caplog, bound, acts):
    load(STAGES["ppo"], write("ppo"), ["--algorithm.epochs=1", "--algorithm.mini_batches=1",
                                       "--algorithm.loss.type=cispo", f"--algorithm.loss.{bound}",
                                       "--coordinator.max_staleness=0", "--algorithm.old_logprobs=policy"])
    assert ("has no effect: with epochs=1" in caplog.text) is not acts


def test_only_what_somebody_set_is_idle(write, caplog, monkeypatch):
    """Neither the learning rate that follows from adapters, nor a section beside what is set in it, nor a preset's."""
    load(STAGES["ppo"], write("ppo"), ["--algorithm.estimator=reinforce", "--critic.lora.rank=4"])
    assert "\n  critic.lora.rank=4 [--critic.lora.rank] has no effect: " in caplog.text
    caplog.clear()
    monkeypatch.setenv("RLHF_RAY_ALGORITHM__PRESET", "dapo")
    load(EvaluateConfig, write("ppo"), [])
    assert "\n  algorithm.preset=dapo [RLHF_RAY_ALGORITHM__PRESET] has no effect: " in caplog.text


@pytest.mark.parametrize(("one", "other", "idle"), [
    ("algorithm.mini_batches", ["1", "4"], "algorithm.loss.clip_high=0.3"),
    ("algorithm.estimator", ["reinforce", "gae"], "algorithm.estimator.lam=0.9"),
    ("policy.optimizer.decay", ["constant", "cosine"], "policy.optimizer.min_ratio=0.1"),
    ("algorithm.estimator", ["reinforce", "gae"], "algorithm.critic_warmup_steps=300"),
    ("algorithm.estimator", ["reinforce", "gae"], "critic.backbone=policy"),
    ("algorithm.importance.tokens", ["truncate", "band"], "algorithm.importance.band=[0.4, 4.0]"),
    ("algorithm.kl.kind", ["fixed", "adaptive"], "algorithm.kl.target=3.0"),
    ("coordinator.max_staleness", ["0", "1"], "weights.in_flight=abort"),
])
def test_a_sweep_warns_where_a_value_is_idle(write, caplog, one, other, idle):
    """Of both runs with the same value, the first cannot use it."""
    given = ["--algorithm.epochs=1", "--run.steps=400", f"--{idle}"]
    for value in other:
        caplog.clear()
        load(STAGES["ppo"], write("ppo"), [*given, f"--{one}={value}"])
        warned = f"\n  {idle} [--{idle.partition('=')[0]}] has no effect: " in caplog.text
        assert warned == (value == other[0]) and len(caplog.records) == warned


def test_without_a_critic_there_is_no_warm_up():
    """The loop would leave the policy untrained for the steps in which a critic that is not there is trained alone."""
    assert AlgorithmConfig(critic_warmup_steps=3).warmup_steps == 3
    assert AlgorithmConfig(critic_warmup_steps=3, estimator="reinforce").warmup_steps == 0


def test_every_check_is_in_the_list():
    listed = [check for checks in CHECKS.values() for check in checks]
    written = {check for name, check in vars(combination_checks).items() if name.startswith("check_")}
    assert set(listed) == written - {combination_checks.check_combinations}
    assert all(len(set(checks)) == len(checks) for checks in CHECKS.values())


@pytest.mark.parametrize("overrides", [["--buffer.capacity_mb=4"], ["--policy.micro_batch_tokens=768"]])
def test_the_limits_themselves_are_allowed(write, overrides):
    load(STAGES["ppo"], write("ppo"), overrides)


def test_a_policy_with_adapters_needs_no_room_for_a_reference(write):
    room = ["--pools.default.cpus=0.5"]
    with pytest.raises(ConfigError, match="reference 1x"):
        load(STAGES["ppo"], write("ppo"), [*room, "--policy.cpus=0.15"])
    config = load(STAGES["ppo"], write("ppo"), [*room, "--policy.cpus=0.15", "--policy.lora={}"])
    assert config.policy.lora.rank == 16 and "reference" not in placements_of(config)
    assert "reference" in placements_of(load(STAGES["ppo"], write("ppo"), ["--critic.lora={}"]))


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("critic", [True, False])
def test_the_bytes_of_a_batch_are_those_of_its_experience(critic, reference):
    """What `check_buffer` reckons with, beside a real record."""
    tokens, zeros = 12, np.zeros(12, np.float32)
    experience = Experience(
        offsets=np.array([0, tokens]), tokens=np.zeros(tokens, np.int32), response_mask=np.zeros(tokens, bool),
        behaviour_logprobs=zeros, old_logprobs=zeros, reference_logprobs=zeros if reference else None,
        values=zeros if critic else None, advantages=zeros, returns=zeros, keys=[SampleKey(0, 0, 0)],
        versions=np.zeros(tokens, np.int32), finish_reasons=["stop"])
    per_token = BYTES_PER_TOKEN + BYTES_PER_VALUE * (critic + reference)
    per_row = sum(column.nbytes for column in (experience.offsets, experience.samples, experience.row_weights))
    assert experience.nbytes - per_row == tokens * per_token


def test_values_that_dropout_moves_are_clipped(write, caplog):
    one_step = ["--algorithm.epochs=1", "--algorithm.mini_batches=1", "--algorithm.value_clip=0.3"]
    for change in ("--critic.head_dropout=0.1", "--critic.lora.dropout=0.1", "--coordinator.max_staleness=1"):
        load(STAGES["ppo"], write("ppo"), [*one_step, change])
    assert "value_clip" not in caplog.text
    load(STAGES["ppo"], write("ppo"), [*one_step, "--policy.lora.dropout=0.1"])
    assert "algorithm.value_clip=0.3 [--algorithm.value_clip] has no effect" in caplog.text


def test_a_pool_without_roles_is_not_reserved(write, caplog):
    pools = ["--pools.default.cpus=1", "--pools.other.cpus=1"]
    config = load(STAGES["ppo"], write("ppo"), [*pools, "--reference.pool=other", "--algorithm.kl.coef=0"])
    assert list(config.pools) == ["default"]
    assert "pools.other.cpus=1 has no effect: no role is placed in this pool" not in caplog.text  # 1 is the default
    load(STAGES["ppo"], write("ppo"), [*pools, "--pools.other.bundles=2"])
    assert "pools.other.bundles=2 [--pools.other.bundles] has no effect: no role is placed in this pool" in caplog.text
    assert sorted(load(STAGES["ppo"], write("ppo"), [*pools, "--critic.pool=other"]).pools) == ["default", "other"]
    config = load(STAGES["ppo"], write("ppo"), [*pools, "--critic.pool=other", "--algorithm.estimator=reinforce"])
    assert list(config.pools) == ["default"] and "critic.pool=other [--critic.pool] has no effect" in caplog.text


def test_k1_may_measure_a_penalty_that_is_off(write):
    load(STAGES["ppo"], write("ppo"), ["--algorithm.kl={placement: loss, estimator: k1, coef: 0}"])
