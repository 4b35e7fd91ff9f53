"""The roles of a stage for planning: their workers, models and memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_ray.config.derived import concurrency_of, derive, placements_of, reward_sections, transport_of
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.rewards import FunctionReward, ModelReward, ProcessReward, RewardConfig
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.stages import (
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    ScorerConfig,
    SFTConfig,
    StageConfig,
)
from rlhf_ray.planning.hardware import CORE, Hardware
from rlhf_ray.planning.inference_memory import WITHOUT_ADAPTERS, GeneratorAdapters, generator_memory, scorer_memory
from rlhf_ray.planning.learner_memory import Training, learner_memory
from rlhf_ray.planning.memory_breakdown import (
    ACTIVATIONS,
    ENVIRONMENT,
    ENVIRONMENTS,
    LOGITS,
    READER,
    RUNTIME,
    SCHEMAS,
    SMALL,
    Memory,
)
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.publication_size import adapter_bytes, bucket_bytes, publication_bytes

Shapes = Callable[[ModelConfig | NewModelConfig, str], ModelShape]
"""Returns the shape of the model that a section names; raises as `model_lookup.shape_of`."""


@dataclass(frozen=True)
class Role:
    """One role, named after its section."""

    name: str
    placement: PlacementConfig
    models: tuple[ModelShape, ...]
    """Empty if the role holds no model."""
    named: str
    """Name of the model in the configuration."""
    memory: Callable[[Hardware], Memory]
    """Computes the memory of one worker on a device of that kind."""


def roles_of(config: StageConfig, shapes: Shapes) -> list[Role]:
    """All roles of a stage; raises as `Shapes`."""
    if isinstance(config, PPOConfig):
        return _ppo(config, shapes)
    if isinstance(config, PreferencesStageConfig):
        shape = shapes(config.model, "model")
        longest = config.prompts.max_tokens + config.generator.sampling.max_tokens
        return [_generator(config.generator, shape, config.model, longest, 0.0),
                _reader("prompt_reader", config.generator.pool)]
    if isinstance(config, SFTConfig | RewardModelConfig | ProcessRewardConfig):
        return [_supervised(config, shapes), _reader("data_reader", config.learner.pool)]
    raise TypeError(f"the roles of {type(config).__name__} are not known")


def _ppo(config: PPOConfig, shapes: Shapes) -> list[Role]:
    shape = shapes(config.model, "model")
    named = config.model.path
    derived = derive(config)
    longest = derived.longest_sample
    adapters = adapter_bytes(config, shape)
    bucket = bucket_bytes(config, shape)
    answers = sampled_share(config)
    copies = 2 if config.generator.sampling.min_tokens and not config.generator.sampling.top_k else 1
    rows = config.coordinator.samples_per_step // config.algorithm.mini_batches
    transport = transport_of(config)
    through_memory = publication_bytes(config, shape) if transport == "object_store" else 0.0
    # One call to a scorer is a chunk, or with staleness, where chunks are batched, up to all samples in flight.
    batched = config.coordinator.max_staleness > 0
    samples = concurrency_of(config.coordinator, config.generator) if batched else config.generator.chunk
    added = WITHOUT_ADAPTERS
    if config.policy.lora and adapters:
        added = GeneratorAdapters(config.policy.lora.rank, adapters)
    # vLLM keeps the bucket before until its layers are complete; one that is read by handle is the learner's memory.
    received = bucket * {"object_store": 1, "nccl": 2, "ipc": 0}[transport]

    def reference() -> Role:
        frozen = shapes(derived.reference_model, "reference")
        return Role("reference", config.reference, (frozen,), derived.reference_model.path,
                    lambda _: scorer_memory(config.reference, frozen, samples, longest, answers, copies,
                                            derived.reference_model.float32_head))

    def policy() -> Role:
        return _learner("policy", config.policy, Training(
            shape, longest, answers, rows, config.policy.ema_decay is not None, bucket,
            direct=transport != "object_store", logit_copies=copies,
            logit_gradients=2 if config.algorithm.entropy_coef else 1, float32_head=config.model.float32_head), named)

    def critic() -> Role:
        trained = shapes(derived.critic_model, "critic").headless()
        return _learner("critic", config.critic, Training(trained, longest, 0.0, rows), derived.critic_model.path)

    with_models = {
        "generator": lambda: _generator(
            config.generator, shape, config.model, longest, received, through_memory, added),
        "reference": reference,
        "reward": lambda: _reward(reward_sections(config), config.reward, shapes, longest, samples),
        "policy": policy,
        "critic": critic,
        "episode_runner": lambda: _episode_runner(config),
    }
    roles = []
    for section, placement in placements_of(config).items():
        roles.append(with_models[section]() if section in with_models else _small(section, placement))
        if section == "assembler":
            roles.append(_reader("prompt_reader", placement.pool))
    return roles


def sampled_share(config: PPOConfig) -> float:
    """Largest share of the tokens of a longest sample that the policy samples: all but its prompt, and of an episode as
    many as its turns may have."""
    turn = config.generator.sampling.max_tokens
    if not config.environments:
        return turn / (config.prompts.max_tokens + turn)
    return max(min(each.max_tokens, each.max_turns * turn) / each.max_tokens for each in config.environments.values())


def _supervised(config: SFTConfig | RewardModelConfig | ProcessRewardConfig, shapes: Shapes) -> Role:
    shape = shapes(config.model, "model")
    named = config.model.path if isinstance(config.model, ModelConfig) else "a new model"
    scalar = isinstance(config, RewardModelConfig)
    rows = config.training.batch_size * (2 if scalar else 1)  # both sides of a pair
    return _learner("learner", config.learner, Training(
        shape.headless() if scalar else shape, config.data.max_tokens, 0.0 if scalar else 1.0, rows,
        float32_head=isinstance(config.model, ModelConfig) and config.model.float32_head), named)


def _generator(config: GenerationConfig, shape: ModelShape, model: ModelConfig, longest: int, bucket: float,
               through_memory: float = 0.0, adapters: GeneratorAdapters = WITHOUT_ADAPTERS) -> Role:
    return Role("generator", config, (shape,), model.path, lambda device: generator_memory(
        config, shape, longest, device, bucket, through_memory, adapters, model.float32_head))


def _small(name: str, placement: PlacementConfig) -> Role:
    """A process without a model."""
    return Role(name, placement, (), "", lambda _: Memory(host={RUNTIME: float(SMALL)}))


def _episode_runner(config: PPOConfig) -> Role:
    """A process that waits for generators and environments, and the processes of its environments, as far as they do
    not grow by what a user's code imports and keeps."""
    processes = [each.concurrency if each.own_process else min(each.processes, each.concurrency)
                 for each in config.environments.values()]
    of_environments = float(sum(processes) * ENVIRONMENT + len(processes) * SCHEMAS)
    return Role("episode_runner", config.episode_runner, (), "",
                lambda _: Memory(host={RUNTIME: float(SMALL), ENVIRONMENTS: of_environments}))


def _reader(name: str, pool: str) -> Role:
    """A process that reads and tokenises the data once; it reserves no resources."""
    return Role(name, PlacementConfig(pool=pool, cpus=0), (), "", lambda _: Memory(host={RUNTIME: float(READER)}))


def _learner(name: str, config: LearnerConfig, model: Training, named: str) -> Role:
    return Role(name, config, (model.shape,), named, lambda _: learner_memory(config, model))


def _reward(rewards: Mapping[str, RewardConfig], scorer: ScorerConfig, shapes: Shapes, longest: int,
            samples: int) -> Role:
    """Each worker holds all components of the rewards and of the judge (by field); functions run in separate processes.
    A call has up to `samples` of up to `longest` tokens."""
    models = [(field, reward) for field, reward in rewards.items()
              if isinstance(reward, ModelReward | ProcessReward)]
    model_shapes = [shapes(reward, field) for field, reward in models]
    model_shapes = [shape.headless() if isinstance(reward, ModelReward) else shape
                    for shape, (_, reward) in zip(model_shapes, models, strict=True)]
    functions = sum(isinstance(reward, FunctionReward) for reward in rewards.values())

    def memory(_: Hardware = CORE) -> Memory:
        parts = [scorer_memory(scorer, shape, samples, longest, 0.0) for shape in model_shapes]
        whole = combined_memory(parts or [Memory(host={RUNTIME: float(SMALL)})])
        host = {**whole.host, RUNTIME: whole.host.get(RUNTIME, 0.0) + functions * SMALL}
        return Memory(device=whole.device, host=host)

    return Role("reward", scorer, tuple(model_shapes), ", ".join(reward.path for _, reward in models), memory)


def combined_memory(parts: list[Memory]) -> Memory:
    """Memory of several models in one process: the process and its largest pass are counted once."""
    once = {RUNTIME, ACTIVATIONS, LOGITS}

    def joined(kind: str) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in parts:
            for name, amount in getattr(part, kind).items():
                total[name] = max(total.get(name, 0.0), amount) if name in once else total.get(name, 0.0) + amount
        return total

    return Memory(device=joined("device"), host=joined("host"))
