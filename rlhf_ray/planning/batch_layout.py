"""How a batch is divided into prompts, samples, mini-batches, ranks and micro-batches, and the size of the buffer."""

from math import ceil

from rlhf_ray.config.derived import concurrency_of, derive, open_episodes, training_sample
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.rewards import rewards_in_words
from rlhf_ray.config.stages import (
    EvaluateConfig,
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    ScorerConfig,
    SFTConfig,
    StageConfig,
)


def batch_layout_of(config: StageConfig) -> dict[str, str]:
    """The layout of a stage's batch as text, by heading."""
    if isinstance(config, EvaluateConfig):
        return {"samples": f"{config.evaluation.samples_per_prompt} for each held-out prompt"}
    if isinstance(config, PPOConfig):
        return _ppo(config)
    if isinstance(config, PreferencesStageConfig):
        return {"samples": "two for each prompt"}
    assert isinstance(config, SFTConfig | RewardModelConfig | ProcessRewardConfig)
    rows = config.training.batch_size
    longest = config.data.max_tokens
    whole = "pairs of rows" if isinstance(config, RewardModelConfig) else "rows"
    updates = f"{config.run.steps} updates" if config.run.epochs is None else config.run.length
    return {"update": f"{rows} {whole} of up to {longest} tokens, {updates}",
            "micro-batches": micro_batches(config.learner, rows, longest * (2 if whole != "rows" else 1))}


def _ppo(config: PPOConfig) -> dict[str, str]:
    derived = derive(config)
    c = config.coordinator
    a = config.algorithm
    samples = config.coordinator.samples_per_step
    longest, _ = training_sample(config)
    tokens = f"{config.prompts.max_tokens} + {config.generator.sampling.max_tokens} = {longest} tokens"
    sample = "sample"
    if config.environments:
        sample = "episode"
        tokens = f"{longest} tokens"
    found = {
        "batch": f"{counted(c.prompts_per_step, 'prompt')} x {counted(c.samples_per_prompt, sample)} = {samples} "
                 f"{sample}s of up to {tokens}",
        "updates": f"{counted(a.epochs, 'epoch')} x {counted(a.mini_batches, 'mini-batch', 'es')} of "
                   f"{samples // a.mini_batches} samples, each an optimizer step; "
                   + (config.run.length if config.run.epochs is None else f"{config.run.length} of the prompts"),
        "policy": micro_batches(config.policy, samples // a.mini_batches, longest),
    }
    if derived.starts_critic:
        found["critic"] = micro_batches(config.critic, samples // a.mini_batches, longest)
    copies = _copies(config.reference) if derived.starts_reference else ""
    found["reference"] = derived.reference_in_words + copies
    if config.reward.shards > 1:
        found["reward"] = rewards_in_words({name: dict(reward) for name, reward in config.rewards.items()}) + _copies(
            config.reward)
    chunk = config.generator.chunk
    found["generators"] = (f"{config.generator.workers} x up to {config.generator.max_sequences} sequences at a time, "
                           f"in chunks of {chunk}; up to {concurrency_of(c, config.generator)} samples in flight")
    if config.environments:
        found["episodes"] = _episodes(config)
    found["staleness"] = (f"{counted(c.max_staleness, 'version')} at most; the buffer holds up to "
                          f"{c.samples_ahead} samples")
    return found


def _episodes(config: PPOConfig) -> str:
    """Environments and runners, as text."""
    turn = config.generator.sampling.max_tokens
    each = "; ".join(
        f"{name} ({environment.label}): up to {counted(environment.max_turns, 'turn')} of up to "
        f"{min(turn, environment.max_tokens)} tokens, {environment.max_tokens} in all, "
        f"{environment.concurrency} open in each runner, "
        + ("a process each" if environment.own_process else
           f"which share {counted(environment.processes, 'process', 'es')}")
        for name, environment in config.environments.items())
    runners = config.episode_runner.workers
    return f"{each}; {counted(runners, 'runner')}, so {open_episodes(config)} are open at the same time at most"


def _copies(config: ScorerConfig) -> str:
    """Copies of a sharded model, as text."""
    if config.shards == 1:
        return ""
    copies = config.workers // config.shards
    return f"; {copies} {'copy' if copies == 1 else 'copies'} of {config.shards} shards (ZeRO 3)"


def counted(number: int, what: str, plural: str = "s") -> str:
    """"1 epoch", "2 epochs"."""
    return f"{number} {what}{'' if number == 1 else plural}"


def micro_batches(learner: LearnerConfig, rows: int, longest: int) -> str:
    """Micro-batches of a rank for a mini-batch whose rows all have the maximum length, as text."""
    count = passes(learner, rows, longest)
    fitting = max(1, learner.micro_batch_tokens // longest)
    ranks = f"{counted(learner.workers, 'rank')} (ZeRO {learner.zero_stage})"
    return (f"{ranks} x up to {counted(count, 'micro-batch', 'es')} of {learner.micro_batch_tokens} tokens, "
            f"{counted(fitting, 'longest row')} each")


def passes(learner: LearnerConfig, rows: float, tokens: float) -> int:
    """Number of micro-batches of a rank for `rows` rows of `tokens` tokens each."""
    fitting = max(1, int(learner.micro_batch_tokens // max(1.0, tokens)))
    return max(1, ceil(ceil(rows / learner.workers) / fitting))
