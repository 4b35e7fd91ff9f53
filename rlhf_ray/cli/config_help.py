"""Help about configuration fields, read from the models: the most used ones, or all of them."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhf_ray.config.fields import FieldDescription, describe_fields
from rlhf_ray.config.load import COMMANDS
from rlhf_ray.config.stages import TRAINING, EvaluateConfig, StageConfig

COMMON: dict[str, list[str]] = {
    "sft": [
        "run.dir", "run.steps", "run.seed", "model.path", "model.architecture.hidden_size", "model.architecture.layers",
        "model.tokenizer", "data.path", "data.text", "data.prompt", "data.response", "data.messages", "data.max_tokens",
        "training.batch_size", "learner.workers",
        "learner.zero_stage", "learner.optimizer.learning_rate", "checkpoint.every",
    ],
    "reward-model": [
        "run.dir", "run.steps", "run.seed", "model.path", "data.path", "data.held_out", "training.batch_size",
        "learner.workers", "learner.zero_stage", "learner.optimizer.learning_rate", "checkpoint.every",
    ],
    "process-reward": [
        "run.dir", "run.steps", "run.seed", "model.path", "data.path", "data.max_tokens", "data.held_out",
        "steps.placeholder", "steps.good", "steps.bad", "steps.separator", "training.batch_size", "learner.workers",
        "learner.optimizer.learning_rate", "checkpoint.every",
    ],
    "preferences": [
        "run.dir", "run.seed", "model.path", "prompts.path", "prompts.limit", "generator.workers",
        "generator.sampling.max_tokens", "generator.sampling.temperature", "pairs.judge", "pairs.min_margin",
    ],
    "ppo": [
        "run.dir", "run.steps", "run.seed", "model.path", "rewards.NAME.type", "rewards.NAME.path", "prompts.path",
        "prompts.max_tokens", "coordinator.prompts_per_step", "coordinator.samples_per_prompt",
        "coordinator.max_staleness", "generator.workers",
        "generator.sampling.max_tokens", "policy.workers", "policy.zero_stage", "policy.optimizer.learning_rate",
        "critic.optimizer.learning_rate", "algorithm.preset", "algorithm.estimator", "algorithm.kl.coef",
        "algorithm.epochs", "algorithm.mini_batches", "algorithm.loss",
        "checkpoint.every", "checkpoint.best_metric", "evaluation.prompts", "early_stop.kl_above",
        "logging.trackers",
    ],
}  # fmt: skip
"""Command -> the fields that its `--help` shows."""
COMMON["evaluate"] = [
    "prompts.path", "prompts.held_out", "environments.NAME.path", "environments.NAME.max_turns", "rewards.NAME.type",
    "evaluation.prompts", "evaluation.limit", "evaluation.samples_per_prompt", "evaluation.sampling.temperature",
    "evaluation.seed", "generator.workers", "generator.sampling.max_tokens", "reference.path", "logging.judge",
]
COMMON |= {command: [path for path in COMMON["ppo"] if not path.startswith("critic.") and path != "algorithm.estimator"]
           for command in ("grpo", "rloo", "reinforce")}

_EXAMPLES = {
    "sft": "rlhf-ray sft configs/quickstart/sft.yaml --run.steps=200 --learner.optimizer.learning_rate=3e-4",
    "reward-model": "rlhf-ray reward-model configs/quickstart/reward_model.yaml --data.held_out=0.2",
    "process-reward": "rlhf-ray process-reward configs/examples/arithmetic/process_reward.yaml --run.steps=50",
    "preferences": "rlhf-ray preferences configs/quickstart/preferences.yaml --pairs.min_margin=0.3",
    "ppo": "rlhf-ray ppo configs/quickstart/ppo.yaml --run.steps=20 --algorithm.kl.coef=0.1",
    "grpo": "rlhf-ray grpo configs/examples/arithmetic/grpo.yaml --run.steps=20 --algorithm.kl.coef=0",
    "rloo": "rlhf-ray rloo configs/examples/arithmetic/rloo.yaml --run.steps=20 --coordinator.samples_per_prompt=2",
    "evaluate": "rlhf-ray evaluate configs/examples/arithmetic/grpo.yaml --model.path=runs/arithmetic/grpo/model "
                "--evaluation.sampling.temperature=0",
    "reinforce": "rlhf-ray reinforce configs/examples/arithmetic/rloo.yaml --algorithm.estimator=reinforce "
                 "--coordinator.samples_per_prompt=1",
}


def print_common_fields(command: str) -> None:
    """The sections of a stage, its most used fields, and an example."""
    cls, console = COMMANDS[command], Console(highlight=False)
    console.print("[bold]Sections[/] of the configuration")
    sections = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, info in _fields_used(cls).items():
        sections.add_row(f"[cyan]{name}[/]", " ".join((info.description or "").split()))
    console.print(sections)
    console.print("\n[bold]Most used fields[/] (every field: --help-all)")
    fields = {f.path: f for f in describe_fields(cls)}
    _print_fields(console, (fields[path] for path in COMMON[command]))
    console.print("\n[bold]Example[/]")
    console.print(f"  {_EXAMPLES[command]}", soft_wrap=True)
    console.print("\nThe command line wins over RLHF_RAY_SECTION__KEY variables, which win over the file.\n")


def print_all_fields(command: str) -> None:
    """Every field of a stage, by section."""
    cls, console = COMMANDS[command], Console(highlight=False)
    for section in _fields_used(cls):
        console.print(_heading(cls, section))
        _print_fields(console, (f for f in describe_fields(cls) if f.section == section))
        console.print()


def fields_that_begin(command: str, typed: str) -> list[FieldDescription]:
    """The fields of a stage whose paths begin with what is typed, without those of sections that users name."""
    cls = COMMANDS[command]
    used = _fields_used(cls)
    return [f for f in describe_fields(cls) if f.path.startswith(typed) and f.section in used and "NAME" not in f.path]


def _fields_used(cls: type[StageConfig]) -> dict[str, Any]:
    """The sections that act in a stage."""
    unused = TRAINING if issubclass(cls, EvaluateConfig) else ()
    return {name: info for name, info in cls.model_fields.items() if name not in unused}


def _heading(cls: type[StageConfig], section: str) -> str:
    sentence = " ".join((cls.model_fields[section].description or "").split())
    return f"[bold cyan]{section}[/]  {sentence}"


def _print_fields(console: Console, fields: Iterable[FieldDescription]) -> None:
    """Each field on a line with its default, and its sentence below, or which field above has the same one."""
    shown: dict[str, str] = {}
    for f in fields:
        default = "required" if f.required else f.default
        console.print(Text.assemble("  ", (f"--{f.path}", "cyan"), f"  {default}"))
        first = shown.setdefault(f.sentence, f.path)
        sentence = f.sentence if first == f.path else f"As --{first}."
        console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 6)))
