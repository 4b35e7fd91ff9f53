"""TRL trains with our run's own numbers, whatever the recipe says."""

from pathlib import Path

from benchmarks.vs_trl import our_config, their_settings

MODELS = Path("/somewhere/quickstart")


def test_trl_gets_the_numbers_of_our_run():
    config = our_config(MODELS, Path("/runs/ours"), updates=9)
    told = their_settings(config, MODELS, Path("/runs/trl"))
    assert told["updates"] == config.run.steps == 9
    assert told["batch"] == config.coordinator.prompts_per_step * config.coordinator.samples_per_prompt
    algorithm = config.algorithm
    estimator = algorithm.estimator
    assert (told["epochs"], told["mini_batches"]) == (algorithm.epochs, algorithm.mini_batches)
    assert (told["kl_coef"], told["gamma"], told["lam"]) == (algorithm.kl.coef, estimator.gamma, estimator.lam)
    assert (told["clip"], told["value_clip"]) == (algorithm.loss.clip_low, algorithm.value_clip)
    assert algorithm.loss.clip_low == algorithm.loss.clip_high, "TRL has one clip for both sides"
    assert told["policy_rate"] == config.policy.optimizer.learning_rate
    assert told["critic_rate"] == config.critic.optimizer.learning_rate
    assert config.policy.optimizer.decay == "linear" and config.critic.optimizer.decay == "constant"
    assert config.policy.optimizer.warmup_steps == config.critic.optimizer.warmup_steps == 0
    assert config.policy.optimizer.betas == config.critic.optimizer.betas == told["optimizer"]["betas"]
    assert told["policy"] == config.model.path == str(MODELS / "sft" / "model")
    assert told["reward_model"] == config.rewards["preference"].path
    assert told["prompts"] == config.prompts.path
    assert told["response_tokens"] == config.generator.sampling.max_tokens


def test_ours_is_spared_what_trl_is_spared():
    config = our_config(MODELS, Path("/runs/ours"), updates=9)
    assert config.evaluation is None and config.logging.judge is None and config.checkpoint.every == 0
    assert (config.generator.sampling.top_p, config.generator.sampling.top_k) == (1.0, 0)
