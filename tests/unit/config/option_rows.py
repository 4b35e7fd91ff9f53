"""What shows that each field of each stage acts: the rows of `test_options`.

A row names fields by their paths (* stands for any part; NAME for a key of the user's, N for an item of a list), and
the stages, all by default. It is one of

    Differs(paths, (a, b), observe)    what `observe` computes from the configuration differs between both values
    Refused(paths, value, words)       the value is refused with these words, which name the reason
    Warned(paths, value, words)        the same with a warning
    Shown(paths, test)                 the test that shows it, by its id: for what takes a real run or a server

`observe` must not echo the configuration: a plan's figure, an engine's argument, a computed number. To add a field, add
its path to a row of the same kind, or a row; `given` holds other fields that it needs, by their paths.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlhf_ray.config.derived import buffer_capacity_mb, concurrency_of, derive, episodes_deadline_s, transport_of
from rlhf_ray.config.load import STAGES
from rlhf_ray.config.stages import PPOConfig, role_facts
from rlhf_ray.coordinator.run_state import kl_controller
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.engine.deepspeed_engine import adamw, deepspeed_config, learning_rate
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.planning.bundle_packing import arrange
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.node_spec import parse_nodes
from rlhf_ray.planning.plan import make_plan
from rlhf_ray.records import Experience, SampleKey
from rlhf_ray.roles.engines.interface import EngineSettings, SampleRequest
from rlhf_ray.roles.engines.vllm_adapter import engine_arguments, generator_environment, sampling_parameters
from rlhf_ray.roles.ppo_update import training_batch

Observe = Callable[[Any, Any], Any]
"""(configuration, section that holds the field) -> what differs."""


@dataclass(frozen=True)
class Row:
    fields: tuple[str, ...]
    stages: tuple[str, ...] = field(default=(), kw_only=True)
    """Empty for all stages that have the fields."""
    given: Mapping[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Differs(Row):
    values: tuple[Any, Any]
    observe: Observe


@dataclass(frozen=True)
class Refused(Row):
    value: Any
    words: str


@dataclass(frozen=True)
class Warned(Row):
    value: Any
    words: str


@dataclass(frozen=True)
class Shown(Row):
    test: str


SUPERVISED = ("sft", "reward-model", "process-reward")
LEARNERS = ("learner", "policy", "critic")
ROLES = tuple(dict.fromkeys(section for stage in STAGES.values() for section in role_facts(stage)))


def of_roles(name: str, roles: tuple[str, ...] = LEARNERS) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for role in roles)


# Observables


def plan(config: Any, _: Any) -> str:
    """Memory, placement, disk, time and findings on a node of two GPUs."""
    made = make_plan(config, parse_nodes("1x2xH100"), shape_of)
    return repr((made.memory, made.placement, made.loads, made.geometry, made.disk, made.step_time, made.findings))


def rates(_: Any, optimizer: Any) -> list[float]:
    return [learning_rate(optimizer, step, 10) for step in range(10)]


def optimizer_arguments(config: Any, optimizer: Any) -> Any:
    learner = config.policy if isinstance(config, PPOConfig) else config.learner
    built = adamw(torch.nn.Linear(2, 2), learner.model_copy(update={"optimizer": optimizer}))
    return [{name: group[name] for name in ("betas", "eps", "weight_decay", "lr")} for group in built.param_groups]


def deepspeed(_: Any, learner: Any) -> Any:
    return deepspeed_config(learner, learner.zero_stage, 1)


def clipping(config: Any, optimizer: Any) -> Any:
    learner = config.policy if isinstance(config, PPOConfig) else config.learner
    return deepspeed_config(learner.model_copy(update={"optimizer": optimizer}), 1, 1)["gradient_clipping"]


def vllm_arguments(config: Any, generation: Any) -> Any:
    settings = EngineSettings(config.model, config.generator, 64, config.run.seed, "generator/0", ["LlamaForCausalLM"],
                              {}, str)
    return repr(engine_arguments(settings))


def sampled(_: Any, sampling: Any) -> Any:
    return repr(sampling_parameters(SampleRequest([1], sampling, sampling.max_tokens, 0, [])))


def order(config: Any, prompts: Any) -> Any:
    return PromptCursor([8], config.run.seed, prompts.shuffle).next(8)


def moved(kl: Any) -> float:
    """The coefficient after a batch of 100 samples with a KL of 5 nats."""
    controller = kl_controller(kl)
    controller.update(5.0, 100)
    return controller.value


def whitened(config: Any, _: Any) -> list[float]:
    """Advantages of a batch of one row."""
    column, keys = np.zeros(4, np.float32), [SampleKey(0, 0, 0)]
    row = Experience(
        offsets=np.array([0, 4]), tokens=np.zeros(4, np.int32), response_mask=np.ones(4, bool),
        behaviour_logprobs=column, old_logprobs=column, reference_logprobs=column, values=column,
        advantages=np.arange(4, dtype=np.float32), returns=column, keys=keys)
    return list(training_batch([row], whiten=config.algorithm.whitens).advantages)


def calls_read(_: Any, environment: Any) -> Any:
    """The calls of tools that are read in a text."""
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    return ToolCallParser.of(environment.tool_format).parse(text).calls


# Rows

GPU = {"pools.default.gpus": 2, "pools.default.cpus": 16}
CPUS = {"pools.default.cpus": 16}
EVALUATION = {"evaluation.prompts": "e.jsonl"}
MCP, OPENENV, NEMO_GYM = (f"tests/unit/environments/test_{name}.py::" for name in ("mcp", "openenv", "nemo_gym"))
NUMBERS = {"prompts.path": None, "prompts.numbered.count": 9, "environments.NAME.path": "tools.py:look",
           "environments.NAME.max_tokens": 768}
ENVIRONMENT = {"environments.NAME.path": "tools.py:look", "environments.NAME.max_tokens": 768}
COMMAND = {"environments.NAME.command.run": ["program"], "environments.NAME.max_tokens": 768}
AGENT_RUNS = "tests/unit/environments/test_agent_runs.py::"
LOSS_OPTIONS = "tests/unit/roles/test_loss_options.py::"
TRACKERS = "tests/unit/observability/test_trackers.py::"
ASSEMBLER = "tests/unit/roles/test_assembler.py::"
PROMPTS = "tests/unit/data/test_prompts.py::"
NUMBERED = "tests/unit/data/test_numbered_rows.py::"
GYMNASIUM = "tests/unit/environments/test_gymnasium.py::"
REASONING_GYM = "tests/unit/environments/test_reasoning_gym.py::"
READERS = "tests/unit/data/test_row_readers.py::"
HTTP = "tests/unit/rewards/http/test_source.py::"
CODE = "tests/unit/rewards/test_code_reward.py::"
TOOL = "tests/unit/environments/test_python_tool.py::"
ESCAPES = "tests/unit/user_code/test_sandbox_escapes.py::"
EPISODES = "tests/unit/roles/test_episode_policies.py::"
SERVING = "tests/unit/serving/"
ROWS: list[Row] = [
    # The run
    Shown(("run.dir",), "tests/unit/stages/test_owned_stage.py::test_a_stage_owns_its_directory_to_its_end"),
    Refused(("run.steps",), 7, "this stage makes no updates", stages=("preferences",)),
    Shown(("run.steps",), "tests/unit/stages/test_resume_preflight.py::test_fewer_steps_than_were_made_are_refused",
          stages=(*SUPERVISED, "ppo")),
    Refused(("run.epochs",), 2.0, "this stage makes no updates", stages=("preferences",)),
    Shown(("run.epochs",), "tests/unit/stages/test_epochs.py::test_an_epoch_is_every_training_row_once",
          stages=(*SUPERVISED, "ppo")),
    Differs(("run.seed",), (0, 1), lambda config, _: PromptCursor([8], config.run.seed, True).next(8)),
    Shown(("run.upload",),
          "tests/unit/stages/test_uploading.py::test_an_interrupted_run_is_copied_with_its_last_checkpoint"),
    Refused(("run.auto_resume",), True, "saves no checkpoints", stages=("preferences",)),
    Shown(("run.auto_resume",), "tests/cluster/test_killed_driver.py::test_a_killed_run_is_started_again_by_its_parent",
          stages=(*SUPERVISED, "ppo")),
    # The cluster
    Shown(("cluster.address", "cluster.allow_open"),
          "tests/cluster/test_open_cluster.py::test_an_open_cluster_is_refused_unless_that_is_asked_for"),
    Warned(("cluster.object_store_mb", "cluster.metrics_port"), 2048, "has its own", given={"cluster.address": "auto"}),
    Warned(("cluster.dashboard",), False, "has its own", given={"cluster.address": "auto"}),
    Differs(("cluster.object_store_mb",), (512, 1024), lambda c, _: buffer_capacity_mb(c.buffer, c.cluster),
            stages=("ppo",)),
    Shown(("cluster.derived",),
          "tests/unit/config/test_settled.py::test_what_a_saved_configuration_derived_is_not_set"),
    Shown(("cluster.metrics_port", "cluster.dashboard"), "tests/cluster/outside.py::interrupted"),
    Shown(("cluster.start_timeout_s",), "tests/cluster/test_pools.py::"
          "test_what_is_only_busy_is_waited_for_and_told_of_and_nothing_is_kept_when_time_is_over"),
    Shown(("cluster.nodes_may_join",),
          "tests/cluster/test_pools.py::test_a_node_that_joins_is_waited_for_where_that_may_happen"),
    Shown(("cluster.call_timeout_s",),
          "tests/unit/workers/test_calls.py::test_a_call_past_its_deadline_names_worker_method_and_setting"),
    Shown(("cluster.heartbeat_timeout_s",),

          "tests/unit/workers/test_heartbeat.py::"
          "test_one_whose_count_stands_still_for_a_lease_is_given_up_and_the_other_is_not",
          stages=("ppo",)),
    Shown(("cluster.disk_timeout_s",),
          "tests/unit/stages/test_hung_stage.py::test_it_ends_by_itself_wherever_the_disk_hangs"),
    Shown(("cluster.max_restarts",), "tests/unit/workers/test_health_monitor.py::"
          "test_a_worker_that_never_completes_a_call_ends_the_run_after_so_many_restarts", stages=("ppo",)),
    Warned(("cluster.max_restarts",), 9, "a lost learner counts for cluster.max_learner_restarts", stages=SUPERVISED),
    Shown(("cluster.heartbeat_timeout_s", "cluster.max_learner_restarts"), "tests/cluster/test_supervised_losses.py::"
          "test_the_run_ends_as_the_undisturbed_one_bit_for_bit", stages=SUPERVISED),
    Shown(("cluster.heartbeat_timeout_s", "cluster.max_restarts"), "tests/cluster/test_preferences_run.py::"
          "test_pairs_are_the_same_when_workers_are_lost", stages=("preferences",)),
    Warned(("cluster.max_learner_restarts",), 9, "no learners", stages=("preferences",)),
    Shown(("cluster.max_learner_restarts",),

          "tests/cluster/test_lost_learners.py::"
          "test_learners_that_are_lost_again_and_again_end_the_run", stages=("ppo",)),
    # Pools and placements
    Differs(("pools.NAME.bundles",), (1, 2), lambda config, _: arrange(config.pools, parse_nodes("1x2xH100")).shares),
    Differs(("pools.NAME.gpus",), (1, 2), lambda _, pool: pool.bundle),
    Differs(("pools.NAME.cpus",), (4, 8), lambda _, pool: pool.bundle),
    Differs(("pools.NAME.resources",), ({}, {"rack": 1.0}), plan),
    Differs(("pools.NAME.labels",), ({}, {"zone": "a"}), plan),
    Warned(("pools.NAME.cpus",), 8, "no role is placed in this pool", stages=("sft",),
           given={"pools.other.cpus": 1, "learner.pool": "other"}),
    Warned(("pools.NAME.strategy",), "SPREAD", "places several bundles, and this pool has one"),
    Shown(("pools.NAME.strategy",),
          "tests/unit/planning/test_bundle_packing.py::test_a_strategy_bounds_what_the_nodes_hold"),
    Refused(of_roles("pool", ROLES), "elsewhere", "is not one of the pools", given=ENVIRONMENT),
    Refused(of_roles("cpus", ROLES), 9, "more than a bundle", given=ENVIRONMENT),
    Refused(of_roles("gpus", ROLES), 1, "more than a bundle", given=ENVIRONMENT),
    Differs(of_roles("workers", ROLES), (1, 2), plan, given={**CPUS, **ENVIRONMENT}),
    Differs(("generator.threads",), (1, 2), lambda config, _: generator_environment(config.generator)),
    Shown(of_roles("threads", tuple(role for role in ROLES if role != "generator")),
          "tests/unit/workers/test_workers.py::test_the_environment_limits_threads_and_the_roles_own_settings_win"),
    # Logging
    Shown(("logging.tensorboard",),
          "tests/unit/observability/test_sinks.py::"
          "test_tensorboard_reads_what_was_written_and_skips_what_is_not_finite",
          stages=(*SUPERVISED, "ppo")),
    Shown(("logging.ray_metrics",),
          "tests/unit/observability/test_sinks.py::test_gauges_appear_on_rays_prometheus_endpoint",
          stages=(*SUPERVISED, "ppo")),
    Shown(("logging.trackers",), TRACKERS + "test_a_resumed_run_is_the_same_one_with_the_steps_that_were_made_again",
          stages=(*SUPERVISED, "ppo")),
    Shown(("logging.project", "logging.run_name", "logging.tags"),
          TRACKERS + "test_mlflow_keeps_a_resumed_run_in_its_directory_without_a_server", stages=(*SUPERVISED, "ppo")),
    Warned(("logging.project", "logging.run_name"), "x", "logging.trackers is empty", stages=(*SUPERVISED, "ppo")),
    Warned(("logging.tags",), ["x"], "logging.trackers is empty", stages=(*SUPERVISED, "ppo")),
    Shown(("logging.task_events",),
          "tests/unit/coordinator/test_step_profile.py::"
          "test_the_clusters_own_record_of_calls_is_kept_where_there_is_one"),
    Shown(("logging.samples",),
          ASSEMBLER + "test_the_samples_of_the_first_prompts_are_saved", stages=("ppo",)),
    Shown(("logging.profile_step",),
          "tests/unit/coordinator/test_step_profile.py::test_the_named_step_is_profiled_and_no_other",
          stages=("ppo",)),
    Shown(("logging.judge",),
          "tests/unit/roles/test_scorers.py::test_a_judge_scores_every_response_and_changes_no_reward",
          stages=("ppo",)),
    Warned(("logging.samples",), 1, "generates no samples", stages=SUPERVISED),
    Refused(("logging.profile_step",), 1, "only PPO profiles steps", stages=SUPERVISED),
    Refused(("logging.judge",), "vader", "no responses to judge", stages=SUPERVISED),
    Warned(("logging.tensorboard", "logging.ray_metrics"), False, "writes no metrics", stages=("preferences",)),
    Refused(("logging.trackers",), ["wandb"], "writes no metrics", stages=("preferences",)),
    Warned(("logging.tags",), ["x"], "writes no metrics", stages=("preferences",)),
    Warned(("logging.project", "logging.run_name"), "x", "writes no metrics", stages=("preferences",)),
    Warned(("logging.samples",), 1, "writes no metrics", stages=("preferences",)),
    Refused(("logging.profile_step",), 1, "writes no metrics", stages=("preferences",)),
    Refused(("logging.judge",), "vader", "ranks by pairs.judge", stages=("preferences",)),
    # Models
    Shown(("model.path", "rewards.NAME.path"), "tests/unit/stages/test_preflight.py::test_a_model_must_be_there"),
    Shown(("model.revision", "model.trust_remote_code", "rewards.NAME.revision", "rewards.NAME.trust_remote_code"),
          "tests/unit/models/test_loading.py::test_foreign_code_needs_a_pinned_revision"),
    Shown(("model.tokenizer", "rewards.NAME.tokenizer"),
          "tests/unit/models/test_loading.py::test_a_tokenizer_comes_from_where_the_configuration_says"),
    Differs(("model.dtype", "rewards.NAME.dtype"), ("float32", "bfloat16"), plan),
    Differs(("model.float32_head",), (False, True), plan, stages=("sft", "process-reward"),
            given={"learner.autocast": "bfloat16"}),
    Differs(("model.float32_head",), (False, True), plan, stages=("ppo",), given={"model.dtype": "bfloat16"}),
    Differs(("model.float32_head",), (False, True), vllm_arguments, stages=("ppo", "preferences"),
            given={"model.dtype": "bfloat16"}),
    Warned(("model.float32_head",), True, "nothing computes the logits in bfloat16",
           stages=("sft", "process-reward", "preferences", "ppo")),
    Warned(("model.float32_head",), True, "float32 in any case", stages=("reward-model",)),
    Warned(("rewards.NAME.float32_head",), True, "compared with a generator's"),
    Shown(("model.architecture.*",), "tests/unit/models/test_loading.py::test_a_new_model_has_the_shape_asked_for"),
    Shown(("model.architecture.family",),
          "tests/unit/models/test_loading.py::test_a_new_model_of_another_family_is_saved_and_loaded_as_one"),
    # Data
    Shown(("prompts.numbered.count", "prompts.mix.N.numbered.count"),
          NUMBERED + "test_there_are_as_many_as_counted_block_by_block"),
    Shown(("*.numbered.first", "*.numbered.columns", "*.mix.N.numbered.first", "*.mix.N.numbered.columns"),
          NUMBERED + "test_rows_have_no_text_and_a_number"),
    Shown(("evaluation.numbered.*", "evaluation.mix.N.numbered.*"),
          NUMBERED + "test_an_evaluation_has_the_numbers_after_those_of_training"),
    Refused(("prompts.numbered.count",), 9, "rows without texts", stages=("preferences",),
            given={"prompts.path": None}),
    Refused(("prompts.mix.N.limit",), 9, "rows without texts", stages=("ppo",),
            given={"prompts.mix.N.path": None, "prompts.mix.N.numbered.count": 9, **ENVIRONMENT}),
    Warned(("prompts.mix.N.column",), "x", "rows without texts", stages=("ppo",),
            given={"prompts.mix.N.path": None, "prompts.mix.N.numbered.count": 9, **ENVIRONMENT}),
    Refused(("prompts.limit",), 9, "gives 9 rows without texts", stages=("ppo",), given=NUMBERS),
    Refused(("prompts.system",), "Be kind.", "gives 9 rows without texts", stages=("ppo",), given=NUMBERS),
    Warned(("prompts.column", "prompts.as_chat"), "true", "gives 9 rows without texts", stages=("ppo",), given=NUMBERS),
    Refused(("evaluation.limit",), 9, "gives 9 rows without texts", stages=("ppo",),
            given={**NUMBERS, "evaluation.numbered.count": 9}),
    Warned(("evaluation.column",), "x", "gives 9 rows without texts", stages=("ppo",),
            given={**NUMBERS, "evaluation.numbered.count": 9}),
    Shown(("*.path", "*.mix.N.path"),
          "tests/unit/stages/test_preflight.py::test_a_missing_file_is_named_with_where_was_looked"),
    Shown(("*.subset", "*.split", "*.revision", "*.mix.N.subset", "*.mix.N.split", "*.mix.N.revision"),
          "tests/unit/data/test_rows.py::test_a_hub_data_set_is_read_up_to_the_limit"),
    Refused(("data.split", "data.subset", "data.revision", "prompts.split", "prompts.subset", "prompts.revision"),
            "other", "the rows come from files"),
    Refused(("evaluation.split", "evaluation.subset", "evaluation.revision"), "other", "the rows come from files",
            given=EVALUATION),
    Refused(("ptx.split", "ptx.subset", "ptx.revision"), "other", "the rows come from files",
            given={"ptx.path": "t.jsonl"}),
    Shown(("ptx.mix.N.*",), "tests/unit/data/test_mix.py::"
          "test_pretraining_text_of_several_data_sets_is_visited_by_weight"),
    Shown(("evaluation.mix.N.path", "evaluation.mix.N.limit"),
          "tests/unit/data/test_mix.py::test_an_evaluation_of_several_data_sets_has_all_their_rows"),
    Refused(("evaluation.mix.N.weight",), 2.0, "is evaluated once"),
    Shown(("data.limit", "prompts.limit", "*.mix.N.limit", "evaluation.limit"),
          PROMPTS + "test_limit_and_column_are_obeyed"),
    Shown(("data.system", "prompts.system"),
          "tests/unit/data/test_conversations.py::test_a_system_message_is_put_before_chats_that_have_none"),
    Shown(("data.system", "prompts.system"),
          "tests/unit/data/test_conversations.py::test_a_system_message_without_chats_is_refused"),
    Shown(("data.as_chat", "prompts.as_chat"),
          "tests/unit/data/test_conversations.py::test_texts_become_chats_when_asked"),
    Shown(("data.mix.N.weight", "prompts.mix.N.weight"),
          "tests/unit/data/test_prompt_cursor.py::test_sources_are_visited_by_weight_each_in_epochs_of_its_own",
          stages=(*SUPERVISED, "ppo")),
    Refused(("prompts.mix.N.weight",), 2.0, "every prompt of each data set is sampled once", stages=("preferences",)),
    Shown(("data.mix.N.*", "prompts.mix.N.column", "evaluation.mix.N.column"),
          "tests/unit/data/test_mix.py::test_parts_take_what_they_do_not_say_from_the_section"),
    Shown(("prompts.column", "evaluation.column"), PROMPTS + "test_limit_and_column_are_obeyed"),
    Shown(("data.text",), "tests/unit/data/test_demonstrations.py::test_plain_texts_carry_loss_everywhere_and_end"),
    Shown(("data.prompt", "data.response"), "tests/unit/data/test_demonstrations.py::test_prompt_tokens_carry_no_loss",
          stages=("sft",)),
    Shown(("data.messages",), "tests/unit/data/test_conversations.py::"
          "test_the_assistants_turns_carry_loss_with_their_ends_and_nothing_else_does"),
    Refused(("data.response",), "answer", "data.prompt is empty", stages=("sft",), given={"data.text": "body"}),
    Refused(("data.as_chat",), True, "data.prompt is empty", stages=("sft",), given={"data.text": "body"}),
    Refused(("data.system",), "Be brief.", "whole texts", stages=("sft",), given={"data.text": "body"}),
    Refused(("data.text",), "body", "other formats", stages=("sft",), given={"data.prompt": "q"}),
    Shown(("data.prompt", "data.chosen", "data.rejected"),
          "tests/unit/data/test_preferences.py::test_sides_hold_prompt_response_and_end_with_loss_on_the_response",
          stages=("reward-model",)),
    Shown(("data.margin",),
          "tests/cluster/test_reward_model_run.py::test_the_held_out_loss_is_beyond_each_pairs_margin"),
    Shown(("data.prompt", "data.steps", "data.labels"),

          "tests/unit/data/test_stepwise_supervision.py::"
          "test_a_row_is_prompt_and_steps_with_placeholders_and_separators_between",
          stages=("process-reward",)),
    Differs(("data.max_tokens",), (32, 64), plan),
    Differs(("prompts.max_tokens",), (32, 64), plan, stages=("ppo",)),
    Shown(("prompts.max_tokens",), PROMPTS + "test_longer_prompts_are_left_out_counted_and_named_never_cut"),
    Shown(("data.held_out", "prompts.held_out"),
          "tests/unit/data/test_preferences.py::test_whole_groups_are_held_out_near_the_share_whatever_the_order"),
    Refused(("prompts.held_out",), 0.1, "this stage has none", stages=("preferences",)),
    Differs(("prompts.shuffle",), (True, False), order, stages=("ppo",)),
    Warned(("prompts.shuffle",), False, "every prompt is sampled once", stages=("preferences",)),
    Shown(("steps.placeholder", "steps.separator"),

          "tests/unit/data/test_stepwise_supervision.py::"
          "test_a_row_is_prompt_and_steps_with_placeholders_and_separators_between"),
    Shown(("steps.good", "steps.bad"),
          "tests/unit/data/test_stepwise_supervision.py::test_hard_labels_are_token_ids_however_they_are_spelt"),
    Shown(("steps.others",),
          "tests/unit/roles/test_supervised.py::test_steps_with_three_labels_have_the_cross_entropy_among_them"),
    # Supervised training
    Differs(("training.batch_size",), (64, 2), plan),
    Shown(("training.batch_size",),
          "tests/unit/roles/test_supervised.py::test_every_row_comes_once_an_epoch_and_batches_reach_into_the_next"),
    Refused(("training.eval_every",), 5, "no rows to evaluate on", given={"data.held_out": 0.0}),
    Shown(("training.eval_every",), "tests/slow/test_steps_learn.py::test_hard_labels_are_learned"),
    Shown(("training.head_dropout", "critic.head_dropout"),
          "tests/unit/models/test_packed_model.py::test_dropout_before_the_head_acts_in_training_only"),
    Shown(("training.head_dropout",), "tests/unit/stages/test_reward_model_options.py::"
          "test_the_learner_gets_the_options_of_training"),
    Shown(("training.new_head",), "tests/unit/stages/test_reward_model_options.py::"
          "test_a_reward_model_keeps_its_head_unless_asked_otherwise"),
    # Learners
    Differs(of_roles("zero_stage"), (1, 3), plan, given={**CPUS, **dict.fromkeys(of_roles("workers"), 2)}),
    Warned(of_roles("zero_stage"), 2, "nothing to divide on one rank"),
    Differs(of_roles("offload_optimizer"), (False, True), deepspeed,
            given={**GPU, **dict.fromkeys(of_roles("gpus"), 0.4)}),
    Differs(of_roles("autocast"), ("float32", "bfloat16"), deepspeed),
    Differs(of_roles("gradient_checkpointing"), (False, True), plan),
    Differs(of_roles("gradient_checkpointing"), (0.5, True), plan),
    Shown(of_roles("compile_layers"),
          "tests/cluster/learners/test_learner_update.py::test_an_update_with_compiled_layers_is_plain_torch_s"),
    Shown(of_roles("router_aux_loss_coef"),
          "tests/unit/roles/test_learners.py::test_the_routers_of_a_mixture_are_balanced"),
    Differs(of_roles("micro_batch_tokens", (*LEARNERS, "reference", "reward")), (2048, 8192), plan),
    Differs(of_roles("optimizer.learning_rate"), (1e-4, 1e-5), rates),
    Differs(of_roles("optimizer.warmup_steps"), (0, 3), rates),
    Differs(of_roles("optimizer.warmup_ratio"), (0.0, 0.3), rates),
    Differs(of_roles("optimizer.decay"), ("constant", "cosine"), rates),
    Differs(of_roles("optimizer.min_ratio"), (0.0, 0.5), rates,
            given=dict.fromkeys(of_roles("optimizer.decay"), "linear")),
    Warned(of_roles("optimizer.min_ratio"), 0.5, "the learning rate does not fall"),
    Differs(of_roles("optimizer.betas"), ([0.9, 0.95], [0.8, 0.9]), optimizer_arguments),
    Differs(of_roles("optimizer.eps"), (1e-8, 1e-5), optimizer_arguments),
    Differs(of_roles("optimizer.weight_decay"), (0.0, 0.1), optimizer_arguments),
    Differs(of_roles("optimizer.grad_clip"), (1.0, 0.5), clipping),
    Shown(of_roles("optimizer.max_consecutive_skipped_updates"),
          "tests/unit/engine/test_deepspeed_engine.py::test_several_updates_in_a_row_that_apply_nothing_are_too_many"),
    Differs(of_roles("lora.rank"), (4, 8), plan),
    Shown(of_roles("lora.targets"), "tests/unit/models/test_lora.py::test_targets_are_the_ends_of_names"),
    Shown(of_roles("lora.alpha"), "tests/unit/models/test_lora.py::test_a_merged_weight_by_hand"),
    Shown(of_roles("lora.dropout"), "tests/unit/engine/test_deepspeed_engine.py::"
          "test_layers_are_told_when_they_are_trained_whatever_they_were_told_before"),
    Differs(("policy.offload_between_phases", "critic.offload_between_phases"), (False, True), plan,
            given={**GPU, "policy.gpus": 0.4, "critic.gpus": 0.4}),
    Differs(("policy.ema_decay",), (None, 0.99), plan),
    Shown(("policy.ema_decay",),
          "tests/cluster/learners/test_policy_options.py::test_the_average_over_three_updates_is_the_one_by_hand"),
    # Checkpoints
    Differs(("checkpoint.keep",), (1, 2), plan),
    Shown(("checkpoint.every",),
          "tests/unit/coordinator/test_loop.py::test_without_a_pace_saving_and_evaluating_happen_at_the_end"),
    Shown(("checkpoint.every_minutes",),
          "tests/unit/coordinator/test_loop.py::test_checkpoints_by_time_come_besides_those_by_steps"),
    Shown(("checkpoint.best_metric", "checkpoint.best_mode"),
          "tests/unit/coordinator/test_best_checkpoint.py::test_better_is_better_and_nothing_else"),
    Warned(("checkpoint.best_mode",), "min", "best_metric is empty"),
    # Generators
    Differs(("generator.engine",), ("in_process", "async"), lambda config, _: config.generator.engine_kind),
    Differs(("generator.max_sequences",), (8, 16), vllm_arguments),
    Differs(("generator.kv_cache_mb",), (32, 64), vllm_arguments),
    Differs(("generator.vllm",), ({}, {"block_size": 64}), vllm_arguments),
    Differs(("generator.gpu_memory_utilization",), (0.5, 0.6), vllm_arguments, given={**GPU, "generator.gpus": 1}),
    Warned(("generator.gpu_memory_utilization",), 0.5, "kv_cache_mb=64 sets the memory"),
    Differs(("generator.tensor_parallel",), (1, 2), vllm_arguments, given={"generator.engine": "async"}),
    Shown(("generator.pipeline_parallel",),
          "tests/unit/roles/test_vllm_adapter.py::test_a_worker_s_gpus_are_divided_as_asked"),
    Differs(("generator.sleep_level",), (0, 1), vllm_arguments, given={**GPU, "generator.gpus": 1}, stages=("ppo",)),
    Warned(("generator.sleep_level",), 1, "no learners", given={**GPU, "generator.gpus": 1}, stages=("preferences",)),
    Differs(("generator.chunk",), (16, 64), lambda c, _: concurrency_of(c.coordinator, c.generator), stages=("ppo",),
            given={"generator.max_sequences": 8}),
    Shown(("generator.chunk",), "tests/unit/coordinator/test_pipeline.py::test_chunks_add_up_to_whole_batches"),
    Shown(("generator.sampling.max_tokens",),
          "tests/unit/roles/test_generator.py::test_each_key_gets_its_prompt_its_seed_and_the_room_that_is_left"),
    Shown(("generator.sampling.temperature",),
          "tests/cluster/test_generator.py::test_logprobs_are_those_after_temperature"),
    Differs(("generator.sampling.top_p", "generator.sampling.min_p"), (0.5, 0.9), sampled, stages=("preferences",)),
    Differs(("generator.sampling.top_p", "generator.sampling.min_p"), (0.5, 0.9), sampled, stages=("ppo",),
            given={"generator.sampling.top_k": 20}),
    Refused(("generator.sampling.top_p", "generator.sampling.min_p"), 0.5, "without top_k", stages=("ppo",)),
    Differs(("generator.sampling.top_k", "generator.sampling.min_tokens"), (2, 3), sampled),
    Differs(("generator.sampling.repetition_penalty",), (1.0, 1.5), sampled, stages=("preferences",)),
    Refused(("generator.sampling.repetition_penalty",), 2, "learners do not compute", stages=("ppo",)),
    Shown(("generator.sampling.stop", "evaluation.sampling.stop"),
          "tests/unit/roles/test_stop_strings.py::test_a_response_ends_with_the_token_that_completes_a_string"),
    Shown(("generator.sampling.stop_token_ids", "evaluation.sampling.stop_token_ids"),
          "tests/cluster/test_sampling.py::test_stop_tokens_end_responses_and_none_before_min_tokens"),
    Differs(("evaluation.sampling.top_p", "evaluation.sampling.min_p", "evaluation.sampling.temperature"), (0.5, 0.9),
            sampled, given=EVALUATION),
    Differs(("evaluation.sampling.top_k", "evaluation.sampling.max_tokens", "evaluation.sampling.min_tokens"), (2, 3),
            sampled, given=EVALUATION),
    Differs(("evaluation.sampling.repetition_penalty",), (1.0, 1.5), sampled, given=EVALUATION),
    # Environments
    Shown(("environments.NAME.path",),
          "tests/unit/environments/test_shapes.py::test_a_class_with_reset_and_typed_methods_is_a_class_with_tools"),
    Shown(("environments.NAME.command.run",), AGENT_RUNS + "test_what_a_program_is_given"),
    Shown(("environments.NAME.command.variables",), AGENT_RUNS + "test_what_a_program_is_given"),
    Shown(("environments.NAME.command.reward",), AGENT_RUNS + "test_the_reward_of_a_program"),
    Shown(("environments.NAME.mcp.command",), MCP + "test_each_episode_has_a_server_that_ends_with_it"),
    Shown(("environments.NAME.mcp.variables",), MCP + "test_variables_are_those_that_are_named"),
    Shown(("environments.NAME.mcp.url", "environments.NAME.mcp.token_variable"),
          MCP + "test_a_server_with_a_url_is_shared_and_gets_the_token"),
    Shown(("environments.NAME.mcp.tools",), MCP + "test_only_named_tools_are_the_policys"),
    Shown(("environments.NAME.mcp.reset_tool", "environments.NAME.mcp.reward_tool"),
          MCP + "test_tools_of_the_row_begin_and_judge_an_episode"),
    Shown(("environments.NAME.mcp.timeout_s",), MCP + "test_a_slow_tool_is_an_answer_and_the_server_goes_on"),
    Shown(("environments.NAME.mcp.replayable",), MCP + "test_whoever_knows_a_server_may_say_that_it_is_replayable"),
    Warned(("environments.NAME.mcp.timeout_s",), 60, "timeout_s.step ends it before",
           given={"environments.NAME.mcp.command": ["server"], "environments.NAME.max_tokens": 768}),
    Shown(("environments.NAME.openenv.url", "environments.NAME.openenv.action"),
          OPENENV + "test_a_reply_may_be_the_action_as_json_and_what_is_wrong_is_read"),
    Shown(("environments.NAME.openenv.token_variable",), OPENENV + "test_the_token_is_sent"),
    Shown(("environments.NAME.openenv.field",),
          OPENENV + "test_actions_of_several_fields_are_json_unless_the_field_is_named"),
    Shown(("environments.NAME.openenv.observation", "environments.NAME.openenv.columns"),
          OPENENV + "test_only_named_columns_and_fields_are_sent_and_read"),
    Shown(("environments.NAME.openenv.connect_s",), OPENENV + "test_a_server_whose_sessions_stay_in_use_is_named"),
    Shown(("environments.NAME.openenv.replayable",), OPENENV + "test_a_server_may_be_said_not_to_be_replayable"),
    Warned(("environments.NAME.openenv.connect_s",), 60, "timeout_s.reset ends it before",
           given={"environments.NAME.openenv.url": "http://server", "environments.NAME.max_tokens": 768}),
    Shown(("environments.NAME.nemo_gym.url", "environments.NAME.nemo_gym.token_variable"),
          NEMO_GYM + "test_an_episode_is_the_requests_of_nemo_gyms_own_agent"),
    Shown(("environments.NAME.nemo_gym.timeout_s",), NEMO_GYM + "test_a_slow_tool_is_an_answer"),
    Shown(("environments.NAME.nemo_gym.replayable",), NEMO_GYM + "test_a_server_may_be_said_to_be_replayable"),
    Warned(("environments.NAME.nemo_gym.timeout_s",), 60, "timeout_s.step ends it before",
           given={"environments.NAME.nemo_gym.url": "http://server", "environments.NAME.max_tokens": 768}),
    Shown(("environments.NAME.gymnasium.id", "environments.NAME.gymnasium.options",
           "environments.NAME.gymnasium.rendering"),
          GYMNASIUM + "test_a_slippery_lake_answers_as_the_library_does_with_the_same_seed_and_actions"),
    Shown(("environments.NAME.gymnasium.actions",),
          GYMNASIUM + "test_a_lake_is_crossed_by_the_names_of_actions_and_drawn_as_text"),
    Shown(("environments.NAME.gymnasium.prompt",),
          GYMNASIUM + "test_the_first_message_is_the_row_s_the_setting_s_or_made_from_the_spaces"),
    Shown(("environments.NAME.reasoning_gym.task", "environments.NAME.reasoning_gym.settings"),
          REASONING_GYM + "test_questions_and_scores_are_those_of_the_library"),
    Shown(("environments.NAME.reasoning_gym.answer",),
          REASONING_GYM + "test_an_answer_is_read_within_tags_or_is_the_whole_text"),
    Refused(("environments.NAME.reasoning_gym.answer",), "text", "scores all that is written",
            given={"environments.NAME.reasoning_gym.task": "chain_sum"}),
    Shown(("environments.NAME.reasoning_gym.system",),
          REASONING_GYM + "test_system_prompts_are_the_library_s_by_name"),
    Shown(("environments.NAME.reasoning_gym.tries",),
          REASONING_GYM + "test_after_a_wrong_answer_there_are_as_many_tries_as_set_and_the_last_score_counts"),
    Refused(("environments.NAME.reasoning_gym.tries",), 17, "needs as many turns",
            given={"environments.NAME.reasoning_gym.task": "chain_sum"}),
    Shown(("environments.NAME.python.timeout_s",), TOOL + "test_a_program_has_its_time"),
    Shown(("environments.NAME.python.keep_state",), TOOL + "test_with_keep_state_names_and_files_stay"),
    Warned(("environments.NAME.python.programs",), 4, "an interpreter of its own",
           given={"environments.NAME.python.keep_state": True, "environments.NAME.max_tokens": 768}),
    Shown(("environments.NAME.python.programs",), TOOL + "test_programs_of_several_episodes_run_at_a_time"),
    Shown(("environments.NAME.python.max_characters",), TOOL + "test_the_middle_of_a_long_text_is_left_out"),
    Shown(("environments.NAME.python.sandbox.memory_mib", "rewards.NAME.sandbox.memory_mib"),
          ESCAPES + "test_a_memory_bomb_gets_an_error"),
    Shown(("environments.NAME.python.sandbox.disk_mib", "rewards.NAME.sandbox.disk_mib"),
          ESCAPES + "test_a_disk_bomb_is_killed_and_removed"),
    Shown(("environments.NAME.python.sandbox.output_kib", "rewards.NAME.sandbox.output_kib"),
          ESCAPES + "test_a_flood_is_cut_and_killed"),
    Shown(("environments.NAME.python.sandbox.max_processes", "rewards.NAME.sandbox.max_processes"),
          ESCAPES + "test_a_fork_bomb_is_bounded_and_killed"),
    Shown(("environments.NAME.python.sandbox.allow_missing", "rewards.NAME.sandbox.allow_missing"),
          "tests/unit/user_code/test_sandbox.py::test_a_missing_rung_can_be_allowed"),
    Shown(("environments.NAME.max_turns",), EPISODES + "test_an_episode_has_at_most_max_turns"),
    Differs(("environments.NAME.max_turns", "environments.NAME.concurrency"), (2, 4), plan, given=ENVIRONMENT),
    Shown(("environments.NAME.max_tokens",), EPISODES + "test_an_episode_has_at_most_max_tokens_with_what_it_read"),
    Differs(("environments.NAME.max_tokens",), (768, 1024), plan, given=ENVIRONMENT),
    Differs(("environments.NAME.processes",), (1, 2), plan, given=ENVIRONMENT),
    Shown(("environments.NAME.timeout_s.step",),
          "tests/unit/environments/test_failures.py::test_what_hangs_in_a_step_is_killed_and_its_neighbours_go_on"),
    Shown(("environments.NAME.timeout_s.reset",),
          "tests/unit/environments/test_failures.py::test_a_reset_that_fails_leaves_nothing_open"),
    Differs(("environments.NAME.timeout_s.episode",), (100.0, 200.0), lambda c, _: episodes_deadline_s(c),
            given=ENVIRONMENT),
    Warned(("environments.NAME.timeout_s.reset", "environments.NAME.timeout_s.step"), 90, "the episode ends before",
           given={**ENVIRONMENT, "environments.NAME.timeout_s.episode": 80}),
    Shown(("environments.NAME.on_failure.parse",),
          EPISODES + "test_a_call_that_cannot_be_read_may_end_the_episode"),
    Shown(("environments.NAME.on_failure.timeout",),
          EPISODES + "test_an_episode_past_a_deadline_is_used_as_configured"),
    Shown(("environments.NAME.on_failure.environment",),
          EPISODES + "test_an_episode_whose_environment_failed_is_used_as_configured"),
    Shown(("environments.NAME.on_failure.agent",),
          "tests/unit/roles/test_agent_attempt.py::test_an_episode_whose_agent_failed_is_used_as_configured"),
    Shown(("environments.NAME.on_failure.overflow",),
          EPISODES + "test_an_episode_that_ran_out_of_turns_is_used_as_configured"),
    Shown(("environments.NAME.on_failure.retries",),
          EPISODES + "test_a_failed_episode_begins_again_so_often_and_is_quarantined_then"),
    Warned(("environments.NAME.on_failure.retries",), 5, "begins no episode again",
           given={**ENVIRONMENT, "environments.NAME.on_failure.environment": "mask"}),
    Differs(("environments.NAME.tool_format",), ("hermes", "json"), calls_read, given=ENVIRONMENT),
    Shown(("environments.NAME.concurrency",),
          EPISODES + "test_a_runner_has_at_most_so_many_open_episodes_of_an_environment"),
    Warned(("environments.NAME.processes",), 3, "gives each episode a process of its own",
           given={**ENVIRONMENT, "environments.NAME.isolated": True}),
    Warned(("environments.NAME.processes",), 3, "each episode of a command has", given=COMMAND),
    Warned(("environments.NAME.isolated",), True, "each episode of a command has", given=COMMAND),
    Warned(("environments.NAME.processes",), 9, "no more processes than these start",
           given={**ENVIRONMENT, "environments.NAME.concurrency": 8}),
    Shown(("environments.NAME.isolated",), "tests/unit/environments/test_failures.py::"
          "test_isolated_episodes_have_a_process_each_that_ends_with_them"),
    Shown(("environments.NAME.memory_mib",),
          "tests/unit/environments/test_failures.py::test_out_of_memory_is_the_failure_of_the_one_that_takes_it"),
    Shown(("episode_runner.column",),
          EPISODES + "test_a_column_names_the_environment_where_there_are_several"),
    Shown(("episode_runner.gateway_host",),
          "tests/unit/stages/test_environment_preflight.py::test_a_gateway_that_others_reach_is_a_warning"),
    Warned(("episode_runner.workers",), 2, "there are no environments"),
    Warned(("episode_runner.gateway_host",), "0.0.0.0", "there are no environments"),
    Warned(("episode_runner.column",), "world", "there is one environment", given=ENVIRONMENT),
    # Preferences
    Shown(("pairs.judge",), "tests/unit/roles/test_texts.py::test_neighbours_form_pairs_and_the_better_is_chosen"),
    Shown(("pairs.min_margin",), "tests/unit/roles/test_texts.py::test_pairs_too_close_are_left_out_in_place"),
    # Rewards
    Shown(("rewards.NAME.type",), "tests/unit/config/test_rewards.py::test_the_type_chooses_the_section"),
    Shown(("rewards.NAME.weight",), "tests/unit/rewards/test_sources.py::test_the_sum_is_weighted"),
    Shown(("rewards.NAME.placement", "rewards.NAME.aggregate"),
          "tests/unit/rewards/test_process_reward_model.py::test_an_outcome_is_one_number_on_the_whole_response"),
    Shown(("rewards.NAME.value",),
          "tests/unit/rewards/test_process_reward_model.py::test_centred_values_cost_where_a_step_is_bad"),
    Shown(("rewards.NAME.label", "rewards.NAME.value"),
          "tests/unit/rewards/test_local_model.py::test_a_label_of_a_sentiment_classifier_is_a_reward"),
    Warned(("rewards.NAME.aggregate",), "mean", "each step has its own reward",
            given={"rewards.NAME": {"type": "process", "path": "r"}}),
    Shown(("rewards.NAME.urls",), HTTP + "test_servers_share_the_work_by_what_is_under_way"),
    Shown(("rewards.NAME.send",), HTTP + "test_tokens_are_sent_where_asked_for"),
    Shown(("rewards.NAME.columns",), HTTP + "test_named_columns_go_along_and_no_others"),
    Shown(("rewards.NAME.batch_size",), HTTP + "test_texts_are_sent_in_batches_and_put_together_in_order"),
    Shown(("rewards.NAME.timeout_s",), "tests/unit/rewards/http/test_faults.py::test_tries_end_when_the_time_does"),
    Shown(("rewards.NAME.request_timeout_s", "rewards.NAME.retries"),
          "tests/unit/rewards/http/test_faults.py::test_a_fault_that_passes_is_waited_out_and_counted"),
    Shown(("rewards.NAME.token_file", "rewards.NAME.token_variable"),
          "tests/unit/rewards/http/test_security.py::TestToken::test_it_is_carried_by_every_request"),
    Shown(("rewards.NAME.allow_hosts",),
          "tests/unit/rewards/http/test_security.py::TestURLs::test_plain_http_to_a_host_on_the_list"),
    Shown(("rewards.NAME.ca_file",),
          "tests/unit/rewards/http/test_security.py::TestCertificates::test_a_trusted_one_for_the_name"),
    Shown(("rewards.NAME.function",), "tests/unit/rewards/test_function_source.py::test_what_a_function_may_look_like"),
    Shown(("rewards.NAME.keep_special_tokens",),
          "tests/unit/rewards/test_response_texts.py::test_special_tokens_reach_a_pattern_and_a_function_on_request"),
    Shown(("rewards.NAME.right", "rewards.NAME.wrong"),
          "tests/unit/rewards/test_rules.py::test_scores_and_failures_of_a_chunk"),
    Shown(("rewards.NAME.answer",),
          "tests/unit/rewards/test_rules.py::test_a_row_without_an_answer_is_an_error_not_a_wrong_response"),
    Refused(("rewards.NAME.answer",), "solution", "a match is sufficient",
            given={"rewards.NAME": {"type": "regex", "pattern": "a"}}),
    Shown(("rewards.NAME.after",), "tests/unit/rewards/test_rules.py::test_the_first_number_after_a_marker"),
    Shown(("rewards.NAME.ignore",), "tests/unit/rewards/test_rules.py::test_exact_matches"),
    Shown(("rewards.NAME.tolerance",),
          "tests/unit/rewards/test_rules.py::test_tolerance_is_an_absolute_difference_both_ways"),
    Shown(("rewards.NAME.pattern", "rewards.NAME.match"),
          "tests/unit/rewards/test_regex_and_json_schema.py::test_a_match_somewhere_or_of_the_whole"),
    Shown(("rewards.NAME.group",), "tests/unit/rewards/test_regex_and_json_schema.py::test_a_group_must_be_the_answer"),
    Shown(("rewards.NAME.accepts",),
          "tests/unit/rewards/test_regex_and_json_schema.py::test_responses_must_be_json_that_the_schema_accepts"),
    Shown(("rewards.NAME.tests",), CODE + "test_another_column_has_the_tests"),
    Shown(("rewards.NAME.program",), CODE + "test_a_response_without_a_program_is_wrong_and_counted"),
    Shown(("rewards.NAME.score",), CODE + "test_by_default_all_tests_must_pass"),
    Shown(("rewards.NAME.timeout_s", "rewards.NAME.total_s"), CODE + "test_a_test_has_its_time_and_all_have_theirs"),
    Shown(("rewards.NAME.processes",), CODE + "test_responses_are_run_side_by_side_while_others_are_served"),
    Shown(("reward.on_failure",),
          "tests/unit/coordinator/test_quarantine.py::test_without_a_quarantine_the_error_ends_the_run"),
    Shown(("reward.quarantine_limit",),
          "tests/unit/coordinator/test_quarantine.py::test_too_many_end_the_run_and_the_first_reasons_are_told"),
    Warned(("reward.quarantine_limit",), 0.5, "the first sample without a score ends the run"),
    Warned(("reward.micro_batch_tokens",), 16384, "none of `rewards` is a local model",
            given={"rewards.NAME": {"type": "number"}}),
    # Roles that are not started
    Warned(("reference.workers",), 2, "frozen base is the reference", given={"policy.lora.rank": 4}),
    Warned(("reference.workers",), 2, "nothing needs a reference", given={"algorithm.kl.coef": 0}),
    Differs(("reference.path",), (None, "other"), lambda config, _: derive(config).reference_model.path),
    Differs(("critic.path",), (None, "other"), lambda config, _: derive(config).critic_model.path),
    Differs(of_roles("shards", ("reference", "reward")), (1, 2), plan,
            given={"reference.workers": 2, "reward.workers": 2}),
    Warned(("reward.shards",), 2, "none of `rewards` is a local model",
            given={"rewards.NAME": {"type": "number"}, "reward.workers": 2}),
    Warned(("critic.workers",), 2, "uses no critic", given={"algorithm.estimator.type": "reinforce"}),
    Refused(("critic.workers",), 2, "one model is trained", given={"critic.backbone": "policy"}),
    Differs(("critic.backbone",), ("own", "policy"), plan),
    Differs(("critic.init",), ("policy", "reward"), lambda config, _: derive(config).critic_model.path),
    # Pretraining text
    Shown(("ptx.column",), "tests/unit/data/test_pretraining.py::test_the_column_is_the_configured_one"),
    Shown(("ptx.limit",), "tests/unit/data/test_rows.py::test_limit_takes_the_first_rows_and_reads_no_further"),
    Shown(("ptx.max_tokens",), "tests/unit/data/test_pretraining.py::test_rows_are_cut_where_they_are_too_long"),
    Shown(("ptx.batch_size",),
          "tests/cluster/learners/test_policy_options.py::test_the_text_s_gradient_is_added_to_the_policy_s"),
    Shown(("ptx.coef",),
          "tests/cluster/learners/test_policy_options.py::test_a_coefficient_of_zero_measures_and_changes_nothing"),
    # The algorithm
    Differs(("algorithm.preset",), ("grpo", "rloo"), plan),
    Shown(("algorithm.estimator.type",), ASSEMBLER + "test_the_estimator_is_the_configured_one"),
    Shown(("algorithm.estimator.gamma", "algorithm.estimator.lam"), ASSEMBLER + "test_advantages_and_returns_by_hand"),
    Warned(("algorithm.estimator.gamma",), 0.5, "is of type grpo, and only gae and reinforce and reinforce_pp",
           given={"algorithm.estimator.type": "grpo", "coordinator.samples_per_prompt": 4}),
    Warned(("algorithm.estimator.lam", "algorithm.estimator.lam_alpha", "algorithm.estimator.lam_critic"), 0.5,
           "has no effect: algorithm.estimator is of type reinforce, and only gae has",
           given={"algorithm.estimator.type": "reinforce"}),
    Refused(("algorithm.estimator.lam",), 0.5, "lam_alpha=0.05 takes its place",
            given={"algorithm.estimator.lam_alpha": 0.05}),
    Shown(("algorithm.estimator.lam_alpha",), ASSEMBLER + "test_lambda_may_follow_the_length"),
    Shown(("algorithm.estimator.lam_critic",), ASSEMBLER + "test_the_critic_may_learn_with_a_lambda_of_its_own"),
    Differs(("algorithm.epochs", "algorithm.mini_batches"), (2, 4), plan),
    Shown(("algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.dual_clip", "algorithm.loss.ratio",
           "algorithm.importance.tokens", "algorithm.importance.cap", "algorithm.importance.level",
           "algorithm.value_clip", "algorithm.value_coef", "algorithm.entropy_coef",
           "algorithm.aggregate", "algorithm.kl.placement", "algorithm.kl.estimator", "algorithm.kl.unbiased",
           "algorithm.importance.band", "algorithm.importance.masks", "algorithm.importance.geometric",
           "algorithm.importance.outlier", "algorithm.loss.min_ratio", "algorithm.loss.max_ratio"),
          LOSS_OPTIONS + "test_an_option_changes_the_loss_as_it_is_worked_out_by_hand"),
    Shown(("algorithm.overlong_filter",),
          "tests/unit/roles/test_rows_left_out.py::test_truncated_samples_are_as_if_they_were_not_in_the_batch"),
    Shown(("algorithm.dynamic_sampling.max_batches",),
          "tests/unit/coordinator/test_dynamic_sampling.py::test_what_is_drawn_last_for_a_place_is_kept_whatever_its_scores"),
    Refused(("algorithm.dynamic_sampling.max_batches",), 10, "compares no samples of a prompt",
            given={"algorithm.estimator.type": "gae"}),
    Refused(("algorithm.reward_clip",), 5.0, "changes their sum, so it would be lost",
            given={"algorithm.estimator.type": "gdpo", "coordinator.samples_per_prompt": 4}),
    Shown(("algorithm.target_kl",),
          "tests/unit/roles/test_target_kl.py::test_the_first_mini_batch_beyond_the_target_ends_the_update"),
    Warned(("algorithm.target_kl",), 0.1, "an update has only its first step",
            given={"algorithm.epochs": 1, "algorithm.mini_batches": 1}),
    Differs(("algorithm.old_logprobs",), ("policy", "generator"), lambda config, _: derive(config).old_logprobs),
    Warned(("algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.value_clip"), 0.1,
            "an update has one step", given={"algorithm.epochs": 1, "algorithm.mini_batches": 1}),
    Shown(("algorithm.value_clip",),
          "tests/unit/config/test_combinations.py::test_values_that_dropout_moves_are_clipped"),
    Warned(("algorithm.loss.dual_clip",), 3.0, "an update has one step",
            given={"algorithm.epochs": 1, "algorithm.mini_batches": 1}),
    Warned(("algorithm.importance.cap",), 3.0, "tokens=none", given={"algorithm.importance.tokens": "none"}),
    Warned(("algorithm.importance.level",), "sequence", "tokens=none", given={"algorithm.importance.tokens": "none"}),
    Warned(("algorithm.importance.band",), [0.4, 4.0], "tokens=truncate has no band"),
    Warned(("algorithm.importance.geometric",), [0.9, 1.1], "the mask geometric is not among masks=[]"),
    Warned(("algorithm.importance.outlier",), [0.1, 10.0], "the mask outlier is not among masks=[]"),
    Refused(("algorithm.importance.masks",), ["geometric"], "which are equal with old_logprobs=generator",
            given={"algorithm.old_logprobs": "generator"}),
    Differs(("algorithm.loss.type",), ("clip", "cispo"), lambda config, _: derive(config).old_logprobs),
    Warned(("algorithm.loss.min_ratio", "algorithm.loss.max_ratio"), 0.5, "is of type clip, and only cispo has",
           given={"algorithm.loss.type": "clip"}),
    Refused(("algorithm.loss.min_ratio",), 6.0, "is not less than max_ratio=5",
            given={"algorithm.loss.type": "cispo"}),
    Warned(("algorithm.kl.unbiased",), False, "the loss has no penalty"),
    Warned(("algorithm.value_clip",), 0.5, "uses no critic", given={"algorithm.estimator.type": "reinforce"}),
    Warned(("algorithm.value_coef",), 0.5, "not one model"),
    Differs(("algorithm.estimator.whiten",), (True, False), whitened),
    Shown(("algorithm.reward_normalisation",),
          ASSEMBLER + "test_scores_are_normalised_first_then_penalised_then_clipped"),
    Shown(("algorithm.reward_clip",), ASSEMBLER + "test_the_score_is_clipped_and_the_penalty_is_not"),
    Shown(("algorithm.missing_eos_penalty",), ASSEMBLER + "test_a_response_that_did_not_end_pays"),
    Shown(("algorithm.overlong_buffer", "algorithm.overlong_penalty"),
          ASSEMBLER + "test_a_response_near_the_limit_pays_for_its_length"),
    Warned(("algorithm.overlong_penalty",), 2.0, "overlong_buffer is empty"),
    Shown(("algorithm.critic_warmup_steps",),
          "tests/unit/coordinator/test_loop.py::test_the_policy_rests_while_the_critic_warms_up"),
    Warned(("algorithm.critic_warmup_steps",), 2, "uses no critic", given={"algorithm.estimator.type": "reinforce"}),
    Differs(("algorithm.kl.coef",), (0.1, 0.2), lambda config, _: kl_controller(config.algorithm.kl).value),
    Differs(("algorithm.kl.kind",), ("fixed", "adaptive"), lambda _, kl: moved(kl)),
    Differs(("algorithm.kl.target",), (3.0, 6.0), lambda _, kl: moved(kl), given={"algorithm.kl.kind": "adaptive"}),
    Differs(("algorithm.kl.horizon",), (1000, 2000), lambda _, kl: moved(kl), given={"algorithm.kl.kind": "adaptive"}),
    Warned(("algorithm.kl.target", "algorithm.kl.horizon"), 3000, "leaves the coefficient as it is"),
    # The loop
    Differs(("coordinator.prompts_per_step",), (64, 128), plan),
    Differs(("coordinator.samples_per_prompt", "coordinator.max_staleness"), (1, 2), plan),
    Differs(("coordinator.concurrency",), (32, 64), lambda c, _: concurrency_of(c.coordinator, c.generator)),
    Shown(("buffer.capacity_mb",),
          "tests/unit/replay/test_buffer.py::"
          "test_reserve_is_refused_while_bytes_are_full_but_reserved_work_may_still_commit"),
    Refused(("buffer.capacity_mb",), 1, "may not hold one batch", given={"prompts.max_tokens": 900}),
    Differs(("weights.transport",), ("object_store", "auto"), lambda config, _: transport_of(config),
            given={**GPU, "generator.gpus": 1, "policy.gpus": 1}),
    Shown(("weights.bucket_mb",), "tests/unit/coordinator/test_weight_sync.py::"
          "test_buckets_are_planned_once_with_the_configured_size_and_what_goes_together"),
    Shown(("weights.in_flight",),
          "tests/cluster/test_generator.py::test_responses_that_new_weights_abort_are_continued_with_what_they_had"),
    Warned(("weights.in_flight",), "abort", "no response is in flight"),
    Shown(("weights.logprob_gap_alarm",),
          "tests/unit/coordinator/test_loop.py::test_generators_and_learner_that_disagree_raise_an_alarm"),
    # Evaluation
    Shown(("evaluation.prompts", "evaluation.split"), "tests/unit/config/test_derived.py::"
          "test_prompts_of_an_evaluation_are_read_as_those_of_training_but_for_what_is_given"),
    Refused(("evaluation.split", "evaluation.column"), "x", "evaluation.prompts and mix are empty",
            given={"prompts.held_out": 0.1}),
    Shown(("evaluation.every",), "tests/unit/coordinator/test_loop.py::test_a_run_in_order"),
    Shown(("evaluation.seed",),
          "tests/unit/coordinator/test_evaluation.py::test_every_held_out_prompt_is_asked_once_with_the_same_seed"),
    Shown(("evaluation.samples_per_prompt",), "tests/unit/coordinator/test_evaluation.py::"
          "test_several_samples_of_a_prompt_have_seeds_of_their_own_and_texts_of_different_prompts"),
    Shown(("evaluation.solved_at",),
          "tests/unit/coordinator/test_evaluation.py::test_which_components_count_as_solved_and_from_where"),
    Warned(("evaluation.solved_at",), 0.5, "is a function or a service", given=EVALUATION),
    Shown(("rewards.NAME.solved_at",),
          "tests/unit/coordinator/test_evaluation.py::test_an_environment_has_its_own_measure_of_solved"),
    Shown(("early_stop.kl_above",),
          "tests/unit/coordinator/test_early_stop.py::test_kl_must_be_over_its_limit_for_as_many_steps_in_a_row"),
    Shown(("early_stop.reward_below_start", "early_stop.patience"),
          "tests/unit/coordinator/test_early_stop.py::test_reward_is_measured_from_the_runs_first_steps"),
    Warned(("early_stop.patience",), 2, "no limit is set"),
    # serve-reward
    Shown(("model.float32_head",), SERVING + "test_settings.py::test_a_reward_model_has_no_logits_in_float32",
          stages=("serve-reward",)),
    Shown(("host", "token"), SERVING + "test_settings.py::test_an_address_that_others_reach_needs_a_token"),
    Shown(("label",), SERVING + "test_settings.py::test_one_of_several_labels_is_served"),
    Shown(("port",),
          SERVING + "test_settings.py::test_a_port_in_use_and_a_certificate_that_is_none_are_told_before_loading"),
    Shown(("tls_cert", "tls_key"),
          SERVING + "test_settings.py::test_a_port_in_use_and_a_certificate_that_is_none_are_told_before_loading"),
    Shown(("max_batch_tokens",),
          SERVING + "test_batcher.py::test_no_pass_is_over_the_budget_and_the_first_come_is_first_served"),
    Shown(("linger_ms",), SERVING + "test_batcher.py::test_the_linger_is_bounded_and_a_full_batch_does_not_linger"),
    Shown(("max_queue",), SERVING + "test_batcher.py::test_a_full_queue_refuses_and_says_for_how_long"),
    Shown(("max_request_mb",),
          SERVING + "test_app.py::TestGate::test_a_body_over_the_limit_is_413_and_read_no_further"),
    # generate and compare
    Shown(("*",),
          "tests/unit/cli/test_generate_commands.py::test_every_option_of_generate_is_handed_on", stages=("generate",)),
    Shown(("*",),
          "tests/unit/cli/test_generate_commands.py::test_every_option_of_compare_is_handed_on", stages=("compare",)),
]
