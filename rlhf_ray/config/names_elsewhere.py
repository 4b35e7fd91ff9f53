"""What TRL, OpenRLHF and verl call our fields, as data: errors about unknown keys say what to write instead, and
`docs/coming_from.md` lists the names.

Names are those of TRL 1.16 with the `TrainingArguments` of transformers (and of its PPO trainer, until 1.12), of
OpenRLHF 0.11.2 (and its options without sections, until 0.9), and of verl 0.9.1. A value is carried over only where
it means the same in both.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from rlhf_ray.config.fields import format_value

SYSTEMS = ("TRL", "OpenRLHF", "verl")
ANYTHING = "{}"
"""In `NameElsewhere.sets`: the value that was given."""


@dataclass(frozen=True)
class NameElsewhere:
    """The names of one setting in other systems."""

    fields: tuple[str, ...]
    """Our fields, of which the first that a stage has is meant; empty for what has no field here."""
    trl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    """Names of no system in particular."""
    example: str = ""
    """A value of theirs."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """What to write, by path, where it is not the field alone with the given value."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Our value for some of theirs."""
    carried: bool = True
    """Whether values that are not in `values` mean the same here."""
    note: str = ""
    """How the meanings differ, or what takes its place."""
    beside: str = ""
    """A section that the stages have for which this holds; all with one of the fields if empty."""

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """By system; "" for common names."""
        return {"TRL": self.trl, "OpenRLHF": self.openrlhf, "verl": self.verl, "": self.common}

    def field_in(self, known: set[str], inside: str = "") -> str | None:
        """Our field in a stage, or in a section, with these fields and sections; "" if there is none to name, None if
        the stage does not have it.

        Args:
            inside: the section in which the name was given; its own field comes first.
        """
        if self.beside and self.beside not in known:
            return None
        if not self.fields:
            return ""
        below = [path.partition(".")[2] for path in self.fields]
        own = [f"{inside}.{path}" for path in below] if inside else []
        others = self.fields if "run" in known else below
        return next((path for path in (*own, *others) if path in known), None)

    def values_here(self, path: str, given: Any) -> dict[str, Any]:
        """Our values by path for a value of theirs; empty if it cannot be carried over."""
        if given is None or isinstance(given, list | tuple | dict):
            return {}
        text = str(given).lower()
        if text in self.values:
            return {path: self.values[text]}
        if not self.carried:
            return {}
        return {name: given if value == ANYTHING else value
                for name, value in (self.sets or {path: ANYTHING}).items()}


def _row(
    fields: str, trl: str = "", openrlhf: str = "", verl: str = "", common: str = "", **more: Any
) -> NameElsewhere:
    """A row whose names are separated by spaces."""
    return NameElsewhere(tuple(fields.split()), tuple(trl.split()), tuple(openrlhf.split()), tuple(verl.split()),
                         tuple(common.split()), **more)


def _optimizer(name: str) -> str:
    return f"policy.optimizer.{name} learner.optimizer.{name}"


_OTHER_STEPS = "a step here is a batch of prompts with all its optimizer steps, and theirs are optimizer steps"
_ESTIMATORS = {"gae": "gae", "grpo": "grpo", "group_norm": "grpo", "rloo": "rloo", "dr_grpo": "dr_grpo",
               "reinforce_plus_plus": "reinforce_pp", "reinforce_baseline": "reinforce_baseline"}

NAMES_ELSEWHERE = (
    # Models
    _row("model.path", "model_name_or_path sft_model_path",
         "actor.model_name_or_path model.model_name_or_path pretrain", "actor_rollout_ref.model.path", "model_path",
         example="org/m"),
    _row("model.revision", "model_revision", example="v1"),
    _row("model.dtype", "dtype", common="torch_dtype", carried=False, example="bfloat16",
         values={"bfloat16": "bfloat16", "float32": "float32"}),
    _row("policy.autocast learner.autocast", "bf16", example="true", values={"true": "bfloat16", "false": "float32"}),
    _row("policy.autocast learner.autocast", "fp16", carried=False, note="there is no float16 here, but bfloat16"),
    _row("policy.gradient_checkpointing learner.gradient_checkpointing", "gradient_checkpointing",
         "actor.gradient_checkpointing_enable model.gradient_checkpointing_enable",
         "actor_rollout_ref.model.enable_gradient_checkpointing", example="true"),
    _row("critic.path", "", "critic.model_name_or_path critic_pretrain", "critic.model.path", example="org/m"),
    _row("model.float32_head", "cast_lm_head_to_fp32", example="true"),
    _row("policy.lora learner.lora", "use_peft peft_config", carried=False,
         note="adapters are trained where the section is given: lora: {rank: 16}"),
    _row("policy.lora.rank learner.lora.rank", "lora_r", "ds.lora.rank", "actor_rollout_ref.model.lora_rank",
         "lora_rank", example="16"),
    _row("policy.lora.alpha learner.lora.alpha", "lora_alpha", "ds.lora.alpha", "actor_rollout_ref.model.lora_alpha",
         example="32"),
    _row("policy.lora.dropout learner.lora.dropout", "lora_dropout", "ds.lora.dropout", example="0.1"),
    _row("policy.lora.targets learner.lora.targets", "lora_target_modules",
         "ds.lora.target_modules", "actor_rollout_ref.model.target_modules", carried=False,
         note="a list of modules, or [all-linear]"),
    _row("model.dtype", "load_in_4bit load_in_8bit", "ds.load_in_4bit", carried=False,
         note="weights are not quantised here; bfloat16 halves those of a frozen base"),
    # Data
    _row("prompts.path data.path", "dataset_name train_dataset", "data.prompt_dataset data.dataset prompt_data",
         "data.train_files", "train_file", example="org/d"),
    _row("prompts.subset data.subset", "dataset_config", common="dataset_config_name", example="main"),
    _row("prompts.split data.split", "dataset_train_split", "data.prompt_split data.dataset_split", example="train"),
    _row("evaluation.split", "dataset_test_split", "eval.split", carried=False,
         note="the split of the data set evaluation.prompts"),
    _row("evaluation.prompts", "eval_dataset", "eval.dataset", "data.val_files", example="org/e"),
    _row("data.held_out", "eval_dataset dataset_test_split", "eval.dataset eval.split", "data.val_files",
         carried=False, note="this stage evaluates on a share of its rows"),
    _row("data.text", "dataset_text_field", example="body"),
    _row("prompts.column data.prompt", "", "data.input_key input_key", "data.prompt_key", example="q"),
    _row("data.response", "", "data.output_key output_key", carried=False,
         note="the column of answers, beside data.prompt"),
    _row("prompts.as_chat data.as_chat", "", "data.apply_chat_template apply_chat_template", carried=False,
         note="conversations get the chat template by themselves; as_chat makes a text the first message of one"),
    _row("rewards", "", "data.label_key label_key", "reward_model.ground_truth", carried=False,
         note="all columns of the prompts reach rewards; those by a rule name theirs with `answer`"),
    _row("prompts.limit data.limit", "", "data.max_samples max_samples", "data.train_max_samples", example="100"),
    _row("prompts.max_tokens", "max_prompt_length", "prompt_max_len", "data.max_prompt_length", example="256",
         note="longer prompts are left out, not cut"),
    _row("data.max_tokens", "max_length max_seq_length", "data.max_len max_len", example="256",
         note="longer rows are left out, not cut"),
    _row("prompts.max_tokens", "", "data.max_len", carried=False,
         note="of prompt and response together; here each has its own, generator.sampling.max_tokens for responses"),
    _row("prompts.shuffle", "shuffle_dataset", "", "data.shuffle", example="false"),
    # The length of a run, and its files
    _row("run.dir", "output_dir", "ckpt.output_dir save_path", "trainer.default_local_dir", "out_dir",
         example="runs/a"),
    _row("run.seed", "", "train.seed", common="seed random_seed", example="3"),
    _row("run.steps", "max_steps", beside="training", example="10"),
    _row("run.steps", "max_steps", beside="algorithm", carried=False, note=_OTHER_STEPS),
    _row("run.steps", "", "", "trainer.total_training_steps", beside="checkpoint", example="10"),
    _row("run.epochs", "num_train_epochs", "train.num_episodes num_episodes", "trainer.total_epochs", "num_epochs",
         beside="checkpoint", example="2"),
    _row("run.epochs", "", "train.max_epochs max_epochs", beside="training", example="2"),
    _row("checkpoint.every", "save_steps", "ckpt.save_steps", beside="training", example="10", values={"-1": 0}),
    _row("checkpoint.every", "save_steps", "ckpt.save_steps", beside="algorithm", carried=False, values={"-1": 0},
         example="-1", note=_OTHER_STEPS),
    _row("checkpoint.every", "", "", "trainer.save_freq", example="10", values={"-1": 0}),
    _row("checkpoint.keep", "save_total_limit", "ckpt.max_num", "trainer.max_actor_ckpt_to_keep", example="3"),
    _row("checkpoint.every_minutes", "save_strategy", carried=False,
         note="checkpoints are saved by time, and every so many steps with checkpoint.every"),
    _row("checkpoint.best_metric", "metric_for_best_model load_best_model_at_end", "ckpt.best_metric_key",
         carried=False, note="reward, loss, accuracy, ...; the best model is exported to best/"),
    _row("", "resume_from_checkpoint", "ckpt.load_enable load_checkpoint", "trainer.resume_mode", carried=False,
         note="repeat the command with --resume"),
    _row("", "push_to_hub hub_model_id", carried=False,
         note="the model of a run is uploaded afterwards: rlhf-ray export RUN --push-to-hub REPO"),
    _row("", "", common="config config_file", carried=False, note="the file is an argument: rlhf-ray STAGE FILE"),
    # Logging and evaluation
    _row("logging.trackers", "report_to", "", "trainer.logger", beside="checkpoint", carried=False, example="wandb",
         values={name: [name] for name in ("wandb", "trackio", "mlflow", "comet_ml", "clearml", "dvclive", "swanlab")}
         | {"none": []},
         note="a list of trackers; TensorBoard is on besides"),
    _row("logging.project", "project", "logger.wandb.project", "trainer.project_name", "wandb_project",
         example="mine"),
    _row("logging.run_name", "run_name", "logger.wandb.run_name", "trainer.experiment_name", example="first"),
    _row("logging.trackers", "", "logger.wandb.key use_wandb", carried=False,
         note="trackers: [wandb], with the key in WANDB_API_KEY"),
    _row("logging.tensorboard", "logging_dir", "logger.tensorboard_dir", carried=False,
         note="events are in tensorboard/ of run.dir"),
    _row("", "logging_steps logging_strategy logging_first_step", "logger.logging_steps", carried=False,
         note="every step is logged"),
    _row("logging.samples", "log_completions", "", "trainer.log_val_generations", carried=False,
         note="samples of every step are saved; `rlhf-ray samples` shows them"),
    _row("training.eval_every", "eval_steps", "eval.steps", example="10", values={"-1": 0}),
    _row("evaluation.every", "eval_steps", carried=False, note=_OTHER_STEPS),
    _row("evaluation.every", "", "eval.steps", "trainer.test_freq", example="10", values={"-1": 0}),
    _row("evaluation.every training.eval_every", "eval_strategy do_eval", carried=False,
         note="an interval of steps; 0 evaluates before the first and after the last"),
    _row("evaluation.samples_per_prompt", "num_generations_eval", "eval.n_samples_per_prompt",
         "actor_rollout_ref.rollout.val_kwargs.n", example="4"),
    # Batches
    _row("coordinator.samples_per_prompt", "num_generations", "rollout.n_samples_per_prompt n_samples_per_prompt",
         "actor_rollout_ref.rollout.n", "group_size", example="8"),
    _row("coordinator.prompts_per_step", "", "rollout.batch_size rollout_batch_size", "data.train_batch_size",
         example="64"),
    _row("coordinator.prompts_per_step", "generation_batch_size", carried=False,
         note="it counts samples: divide it by num_generations"),
    _row("coordinator.prompts_per_step", "", common="batch_size train_batch_size", carried=False,
         note="prompts of a step, each with coordinator.samples_per_prompt samples"),
    _row("training.batch_size", "", "train.batch_size train_batch_size", "", "batch_size", example="32"),
    _row("algorithm.mini_batches", "", "train.batch_size", carried=False,
         note="it counts samples of an optimizer step: divide all samples of a step by it"),
    _row("algorithm.mini_batches", "", "", "actor_rollout_ref.actor.ppo_mini_batch_size", carried=False,
         note="it counts prompts of an optimizer step: divide data.train_batch_size by it"),
    _row("algorithm.mini_batches", "num_mini_batches", example="4"),
    _row("algorithm.mini_batches", "gradient_accumulation_steps steps_per_generation", carried=False,
         note="a step's samples (prompts_per_step x samples_per_prompt) over mini_batches are an optimizer step's, on "
              "all ranks; micro-batches follow from policy.micro_batch_tokens"),
    _row("training.batch_size", "gradient_accumulation_steps", carried=False,
         note="batch_size counts the rows of an optimizer step on all ranks; micro-batches follow from "
              "learner.micro_batch_tokens"),
    _row("policy.micro_batch_tokens learner.micro_batch_tokens", "per_device_train_batch_size",
         "train.micro_batch_size micro_train_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
         "critic.ppo_micro_batch_size_per_gpu", carried=False,
         note="it counts rows of a process in a pass, and micro_batch_tokens counts tokens; the batch of the whole run "
              "is coordinator.prompts_per_step, or training.batch_size without a policy"),
    _row("policy.micro_batch_tokens learner.micro_batch_tokens", "", "train.max_tokens_per_gpu",
         "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", example="16384"),
    # Optimizer
    _row(_optimizer("learning_rate"), "learning_rate", "actor.adam.lr adam.lr actor_learning_rate",
         "actor_rollout_ref.actor.optim.lr", "lr", example="1e-6"),
    _row("critic.optimizer.learning_rate", "", "critic.adam.lr critic_learning_rate", "critic.optim.lr",
         "critic_lr", example="9e-6"),
    _row(_optimizer("weight_decay"), "weight_decay", "actor.adam.weight_decay adam.weight_decay",
         "actor_rollout_ref.actor.optim.weight_decay", example="0.01"),
    _row(_optimizer("eps"), "adam_epsilon", "actor.adam.eps adam.eps", example="1e-8"),
    _row(_optimizer("betas"), "adam_beta1 adam_beta2", "actor.adam.betas adam.betas adam_betas", carried=False,
         note="both numbers in a list, such as [0.9, 0.95]"),
    _row(_optimizer("grad_clip"), "max_grad_norm", "actor.max_norm max_norm", "actor_rollout_ref.actor.grad_clip",
         example="1.0"),
    _row(_optimizer("warmup_ratio"), "warmup_ratio", "actor.lr_warmup_ratio lr_warmup_ratio",
         "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", example="0.03"),
    _row(_optimizer("warmup_steps"), "warmup_steps", "", "actor_rollout_ref.actor.optim.lr_warmup_steps",
         example="10", values={"-1": 0}),
    _row(_optimizer("decay"), "lr_scheduler_type", "actor.lr_scheduler lr_scheduler", carried=False, example="cosine",
         values={"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"},
         note="constant, linear or cosine, down to optimizer.min_ratio"),
    _row(_optimizer("min_ratio"), "", "actor.min_lr_ratio min_lr_ratio",
         "actor_rollout_ref.actor.optim.min_lr_ratio", example="0.1"),
    _row("", "optim", "actor.optim", carried=False, note="AdamW is the only optimizer"),
    # The algorithm
    _row("algorithm.estimator", "", "algo.advantage.estimator advantage_estimator", "algorithm.adv_estimator",
         carried=False, values=_ESTIMATORS, example="group_norm", note="`rlhf-ray ppo --help-all` lists ours"),
    _row("algorithm.estimator", "scale_rewards", carried=False, example="none", note="grpo or dr_grpo",
         values={"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}),
    _row("algorithm.epochs", "num_iterations num_ppo_epochs", "train.max_epochs max_epochs",
         "actor_rollout_ref.actor.ppo_epochs", example="2"),
    _row("algorithm.loss.clip_low", "epsilon cliprange", "actor.eps_clip eps_clip",
         "actor_rollout_ref.actor.clip_ratio", "clip_range", example="0.2",
         sets={"algorithm.loss.clip_low": ANYTHING, "algorithm.loss.clip_high": ANYTHING}),
    _row("algorithm.loss.clip_low", "", "", "actor_rollout_ref.actor.clip_ratio_low", example="0.2"),
    _row("algorithm.loss.clip_high", "epsilon_high", "", "actor_rollout_ref.actor.clip_ratio_high", example="0.28"),
    _row("algorithm.loss.clip_low", "", "actor.eps_clip_low_high", carried=False,
         note="its two numbers are clip_low and clip_high"),
    _row("algorithm.loss.dual_clip", "delta", "actor.dual_clip", "actor_rollout_ref.actor.clip_ratio_c",
         example="3.0"),
    _row("algorithm.loss.ratio", "importance_sampling_level", carried=False, example="sequence",
         values={"token": "token", "sequence": "sequence"}),
    _row("algorithm.loss.ratio", "", "actor.policy_loss_type", carried=False, example="gspo",
         values={"ppo": "token", "gspo": "sequence"}),
    _row("algorithm.aggregate", "loss_type", carried=False, example="grpo",
         values={"dapo": "token", "grpo": "sequence"},
         note="token is dapo's mean, sequence grpo's; algorithm.loss has cispo"),
    _row("algorithm.aggregate", "", "actor.loss_agg_mode", carried=False,
         note="token or sequence: the mean over tokens, or over rows"),
    _row("algorithm.loss", "", "", "actor_rollout_ref.actor.policy_loss.loss_mode", carried=False,
         note="clip or cispo; gspo is clip with algorithm.loss.ratio=sequence"),
    _row("algorithm.aggregate", "", "", "actor_rollout_ref.actor.loss_agg_mode", carried=False, example="token-mean",
         values={"token-mean": "token", "seq-mean-token-mean": "sequence"}),
    _row("algorithm.value_clip", "cliprange_value", "critic.value_clip value_clip", "critic.cliprange_value",
         example="0.5"),
    _row("algorithm.value_coef", "vf_coef", carried=False,
         note="it acts only where critic.backbone=policy; a critic of its own has a loss of its own"),
    _row("algorithm.estimator.gamma", "gamma", "algo.advantage.gamma", "algorithm.gamma", example="1.0"),
    _row("algorithm.estimator.lam", "lam", "algo.advantage.lambd lambd", "algorithm.lam", "gae_lambda",
         example="1.0"),
    _row("algorithm.estimator.whiten", "", common="whiten_advantages", example="true"),
    _row("algorithm.entropy_coef", "entropy_coef", "actor.entropy_coef", "actor_rollout_ref.actor.entropy_coeff",
         example="0.001"),
    _row("algorithm.kl.coef", "beta kl_coef", "algo.kl.init_coef init_kl_coef",
         "algorithm.kl_ctrl.kl_coef actor_rollout_ref.actor.kl_loss_coef", example="0.01"),
    _row("algorithm.kl.placement", "", "algo.kl.use_loss use_kl_loss", "actor_rollout_ref.actor.use_kl_loss",
         carried=False, example="true", values={"true": "loss"}),
    _row("algorithm.kl.placement", "", "", "algorithm.use_kl_in_reward", carried=False, example="true",
         values={"true": "reward"}),
    _row("algorithm.kl.estimator", "kl_estimator", "algo.kl.estimator", carried=False, example="k3",
         values={"k1": "k1", "k2": "k2", "k3": "k3"}),
    _row("algorithm.kl.estimator", "", "", "actor_rollout_ref.actor.kl_loss_type", carried=False,
         example="low_var_kl", values={"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs"}),
    _row("algorithm.kl.unbiased", "use_bias_correction_kl", "algo.kl.unbiased_gradient", example="false"),
    _row("algorithm.kl.kind", "", "", "algorithm.kl_ctrl.type", carried=False, example="fixed",
         values={"fixed": "fixed", "adaptive": "adaptive"}),
    _row("algorithm.kl.target", "", "algo.kl.target kl_target", "algorithm.kl_ctrl.target_kl", carried=False,
         note="with algorithm.kl.kind=adaptive, in nats of a response (verl: of a token)"),
    _row("algorithm.kl.horizon", "", "algo.kl.horizon kl_horizon", "algorithm.kl_ctrl.horizon", example="10000"),
    _row("algorithm.importance.tokens", "vllm_importance_sampling_correction", carried=False, example="false",
         values={"false": "none"}, note="on by default"),
    _row("algorithm.importance.tokens", "", "algo.advantage.is_correction_level algo.advantage.is_correction_enable",
         "algorithm.rollout_correction.rollout_is", carried=False,
         note="truncate by default; none, mask or band with algorithm.importance.cap and band"),
    _row("algorithm.importance.cap", "vllm_importance_sampling_clip_max vllm_importance_sampling_cap", example="3.0"),
    _row("algorithm.overlong_filter", "mask_truncated_completions", example="true"),
    _row("algorithm.overlong_buffer", "", "reward.overlong_buffer_len", example="32"),
    _row("algorithm.overlong_penalty", "", "reward.overlong_penalty_factor", example="1.0"),
    _row("algorithm.missing_eos_penalty", "", "reward.stop_properly_penalty_coef", carried=False,
         note="here it is subtracted from the score"),
    _row("algorithm.dynamic_sampling", "", "algo.dynamic_filtering_enable dynamic_filtering",
         "algorithm.filter_groups.enable", carried=False, example="true", values={"true": True}),
    _row("algorithm.critic_warmup_steps", "", "critic.freezing_steps", "trainer.critic_warmup", example="3"),
    # Rewards
    _row("rewards", "reward_model_path", "reward.model_name_or_path reward_pretrain", "reward_model.model.path "
         "reward.reward_model.model_path", example="org/r",
         sets={"rewards.quality.type": "model", "rewards.quality.path": ANYTHING}),
    _row("rewards", "reward_funcs reward_weights", "reward.remote_url remote_rm_url",
         "custom_reward_function.path reward.custom_reward_function.path", carried=False,
         note="a mapping: rewards: {NAME: {type: function, function: \"file.py:name\", weight: 1}}, or type: http "
              "with urls"),
    # Sampling and engines
    _row("generator.sampling.max_tokens", "max_completion_length response_length",
         "rollout.max_new_tokens generate_max_len", "data.max_response_length", "max_new_tokens", example="128"),
    _row("generator.sampling.temperature", "temperature", "rollout.temperature",
         "actor_rollout_ref.rollout.temperature", example="1.0"),
    _row("generator.sampling.top_p", "top_p", "rollout.top_p", "actor_rollout_ref.rollout.top_p", carried=False,
         note="in training it needs generator.sampling.top_k of 2 or more"),
    _row("generator.sampling.top_k", "top_k", "", "actor_rollout_ref.rollout.top_k", example="50",
         values={"-1": 0}),
    _row("generator.sampling.min_p", "min_p", carried=False,
         note="in training it needs generator.sampling.top_k of 2 or more"),
    _row("generator.vllm", "", "", "actor_rollout_ref.rollout.engine_kwargs.vllm", carried=False,
         note="a mapping of the engine's arguments"),
    _row("generator.workers", "", "vllm.num_engines vllm_num_engines", example="2"),
    _row("generator.tensor_parallel", "vllm_tensor_parallel_size",
         "vllm.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size", "tensor_parallel_size",
         example="1"),
    _row("generator.gpu_memory_utilization", "vllm_gpu_memory_utilization",
         "vllm.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization", example="0.6"),
    _row("generator.pool", "use_vllm vllm_mode", "train.colocate_all colocate_all_models",
         "actor_rollout_ref.hybrid_engine", carried=False,
         note="generators are always vLLM's; roles that name the same pool share its GPUs"),
    _row("generator.sleep_level", "vllm_enable_sleep_mode", "vllm.enable_sleep vllm_enable_sleep",
         "actor_rollout_ref.rollout.free_cache_engine", carried=False,
         note="1 frees the cache during updates, 2 the weights too; on GPUs"),
    _row("coordinator.max_staleness", "max_staleness", example="1"),
    _row("coordinator.max_staleness", "", "train.async_enable async_train train.async_queue_size", carried=False,
         note="versions that samples may be old; 0 alternates rollouts and updates"),
    # Places
    _row("policy.zero_stage learner.zero_stage", "", "ds.zero_stage zero_stage", example="3"),
    _row("policy.offload_optimizer learner.offload_optimizer", "", "ds.adam_offload adam_offload", carried=False,
         note="true, on GPUs"),
    _row("policy.zero_stage learner.zero_stage", "deepspeed fsdp fsdp_config", "",
         "actor_rollout_ref.actor.fsdp_config", carried=False,
         note="DeepSpeed's own settings follow from ours"),
    _row("pools", "", "actor.num_nodes actor.num_gpus_per_node", "trainer.nnodes trainer.n_gpus_per_node",
         carried=False, note="derived from the machines' GPUs, or pools of bundles with the roles' workers and gpus"),
)
"""Row by row; of several rows with the same name, the first that a stage has counts."""


def rows_named(name: str) -> Iterator[tuple[NameElsewhere, str]]:
    """Rows with a name and whose it is, in order. After those with the whole name, those that end with it, if it has
    several words: `rollout.n`, `clip_ratio_low`."""
    wanted = name.replace("-", "_").lower()
    named = [(row, system, names) for row in NAMES_ELSEWHERE for system, names in row.names.items()]
    yield from ((row, system) for row, system, names in named if wanted in names)
    if "." in wanted or "_" in wanted:
        yield from ((row, system) for row, system, names in named
                    if any(each.endswith(f".{wanted}") for each in names))


def meaning_elsewhere(name: str, value: Any, known: set[str], inside: str = "", python: bool = False,
                      accepts: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> str | None:
    """What to write in place of a name of another system; None if it is none.

    Args:
        value: what was given.
        known: fields and sections of the stage, or of the section that was made from Python.
        inside: as in `NameElsewhere.field_in`.
        python: name the remedy as arguments, not as YAML and options.
        accepts: whether our fields take these values by path; what they do not take is not said to be written.
    """
    rows = list(rows_named(name))
    for row, system in rows:
        path = row.field_in(known, inside)
        if path is None:
            continue
        whose = f"{system}'s name" if system else "a usual name"
        if not path:
            return f"it is {whose}; {row.note}"
        values = row.values_here(path, value)
        what = f"it is {whose} for {path}" if values else f"the nearest to {whose} is {path}"
        note = f" ({row.note})" if row.note else ""
        written = as_arguments(values) if python else f"{as_inline_yaml(values)}, or {as_options(values)}"
        return f"{what}{note}" + (f": write {written}" if values and accepts(values) else "")
    if rows and "run" in known:
        row, system = rows[0]
        return (f"it is {system}'s name" if system else "it is a usual name") + (
            f" for {row.fields[0]}, which this stage does not have; remove it")
    return None


def as_inline_yaml(values: Mapping[str, Any]) -> str:
    """Values by path on one line: `algorithm: {kl: {coef: 0.01}}`."""
    nested = nest(values)
    return ", ".join(f"{key}: {_flow(value)}" for key, value in nested.items())


def as_options(values: Mapping[str, Any]) -> str:
    """The same on the command line, quoted for a shell: `--algorithm.kl.coef=0.01`."""
    return " ".join(quote(f"--{path}={format_value(value)}") for path, value in values.items())


def as_arguments(values: Mapping[str, Any]) -> str:
    """The same from Python: `algorithm={'kl': {'coef': 0.01}}`."""
    return ", ".join(f"{key}={value!r}" for key, value in nest(values).items())


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by path as nested mappings."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value
    return nested


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str) and re.search(r"[:#,&*!|>%@`{}\[\]'\"]", value):  # could mean something else in YAML
        return json.dumps(value, ensure_ascii=False)
    return format_value(value)
