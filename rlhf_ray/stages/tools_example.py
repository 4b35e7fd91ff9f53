"""`rlhf-ray example tools`: a model learns to call tools over several turns, through the ordinary stages.

A small model imitates hasty demonstrations of a task that takes three tools (SFT). Then only right sums are rewarded,
by the environment that answers the calls; held-out questions measure it.
"""

import importlib.util
from pathlib import Path
from typing import Any

from rlhf_ray.data.tool_tasks import WORDS, write_tool_tasks
from rlhf_ray.stages.bundled_recipes import Recipe
from rlhf_ray.stages.example_stages import make_chat_tokenizer, run_stages, write_verdict

RECIPE = Recipe("examples/tools", home="runs/tools")
ENVIRONMENT = "lookup_and_calculator.py"
SHOWN = ("reward", "solved", "failed", "turns", "tool_calls", "tool_failures", "kl", "length")
KEPT = {"turns_mean": "turns", "tool_calls": "tool_calls", "tool_failures": "tool_failures"}
"""Key of the summary -> metric."""


def run(directory: Path, estimator: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        overrides: `--section.key=value` changes of the reinforcement learning.

    Returns:
        The contents of summary.json: success before and after, and of the held-out episodes after it the mean turns and
        the mean tool calls, also those that failed; and seconds.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    path = f"--environments.tools.path={environment_file()}:Shop"
    run_dir, seconds = run_stages(RECIPE, "tools", directory, seed, estimator, [path, *overrides], make_data)
    return write_verdict(directory, run_dir, seconds, "held-out questions right", SHOWN, KEPT)


def environment_file() -> Path:
    """The file of the environment, beside the configurations."""
    return RECIPE.folder() / ENVIRONMENT


def environment_class() -> Any:
    """The class in that file."""
    spec = importlib.util.spec_from_file_location("lookup_and_calculator", environment_file())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Shop


def tool_schemas(shop: Any) -> list[dict[str, Any]]:
    """JSON schemas of the tools of that class."""
    from transformers.utils import get_json_schema

    return [get_json_schema(getattr(shop(), name)) for name in ("lookup", "calculator", "submit")]


def make_data(directory: Path, seed: int) -> None:
    """Write demonstrations, prompts and a tokenizer with a chat template, unless they exist."""
    data = directory / "data"
    if (data / "tokenizer" / "chat_template.jinja").is_file():
        return
    print("data: writing questions and demonstrations")
    shop = environment_class()
    files = write_tool_tasks(data, seed, shop, tool_schemas(shop))
    make_chat_tokenizer(data / "tokenizer", files.sft, WORDS)
