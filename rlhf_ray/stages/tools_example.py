"""`rlhf-ray example tools`: a model learns to call tools over several turns, through the ordinary stages.

A small model imitates hasty demonstrations of a task that takes three tools (SFT). Then only right sums are rewarded,
by the environment that answers the calls, or by an agent that runs the same tools in a loop of its own; held-out
questions measure it.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_ray.data.row_readers import read_rows
from rlhf_ray.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from rlhf_ray.data.tool_tasks import WORDS, write_tool_tasks
from rlhf_ray.data.tool_template import TOOL_TAGS, TURN_END, TURN_START, give_tool_template
from rlhf_ray.errors import ConfigError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.run_directory import read_json
from rlhf_ray.observability.tables import changes, print_before_after, print_texts
from rlhf_ray.stages.bundled_recipes import Recipe
from rlhf_ray.stages.example_stages import run_stages

RECIPE = Recipe("examples/tools", home="runs/tools")
ENVIRONMENT, AGENT = "lookup_and_calculator.py", "agent.py"
SHOWN = ("reward", "solved", "failed", "turns", "tool_calls", "tool_failures", "kl", "length")
VOCABULARY, RARE, READ = 1024, 100, 2_000
"""At most so many tokens; how often two tokens must be neighbours in how many demonstrations to become one: pairs of
items are not."""


def run(directory: Path, estimator: str, seed: int, overrides: list[str], *, agent: bool = False) -> dict[str, Any]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        overrides: `--section.key=value` changes of the reinforcement learning.
        agent: its episodes are played by the agent, in a run `agent` beside that with the environment.

    Returns:
        The contents of summary.json: success before and after, and of the held-out episodes after it the mean turns and
        the mean tool calls, also those that failed; and seconds.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    if not (RECIPE.folder() / f"{estimator}.yaml").is_file():
        raise ConfigError(f"the example tools has no --estimator {estimator}; leave it out, which means grpo")
    played = [f"--environments.tools.path={environment_file()}:Shop"]
    if agent:
        played = [f"--environments.tools.path={agent_file()}:agent",
                  f"--run.dir={directory / 'agent'}"]
    run_dir, seconds = run_stages(RECIPE, "tools", directory, seed, estimator, [*played, *overrides], make_data)
    return write_verdict(directory, run_dir, seconds)


def environment_file() -> Path:
    """The file of the environment, beside the configurations."""
    return RECIPE.folder() / ENVIRONMENT


def agent_file() -> Path:
    """The file of the agent, beside it."""
    return RECIPE.folder() / AGENT


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
    from transformers import AddedToken

    data = directory / "data"
    if (data / "tokenizer" / "chat_template.jinja").is_file():
        return
    print("data: writing questions and demonstrations")
    shop = environment_class()
    files = write_tool_tasks(data, seed, shop, tool_schemas(shop))
    train_tokenizer([], SMALLEST_VOCABULARY, data / "tokenizer")
    texts = list(_texts(files.sft, data / "tokenizer"))
    train_tokenizer(texts, VOCABULARY, data / "tokenizer", across_words=True, min_frequency=RARE)
    tokenizer = give_tool_template(data / "tokenizer")
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in WORDS])
    tokenizer.save_pretrained(data / "tokenizer")


def _texts(demonstrations: Path, tokenizer: Path) -> Iterator[str]:
    """What stands between the template's tokens in the first demonstrations."""
    template = give_tool_template(tokenizer)
    tags = re.compile("|".join([*map(re.escape, (TURN_START, TURN_END, *TOOL_TAGS)), rf"\b(?:{'|'.join(WORDS)})\b"]))
    for row in read_rows(str(demonstrations), "train", READ).records:
        yield from tags.split(str(template.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)))


def write_verdict(directory: Path, run_dir: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Print the held-out results before and after: a table, three texts and a sentence; and write summary.json."""
    evaluation = read_json(run_dir / "evaluation.json")
    before, after = evaluation["before"], evaluation["after"]
    print_before_after(changes(*({name: side[name] for name in SHOWN if name in side} for side in (before, after))))
    print_texts(evaluation["texts"][:3])
    print(f"verdict: {before['solved']:.1%} of held-out questions right before, {after['solved']:.1%} after")
    print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    print(f"model: {run_dir / 'model'}\nreport: {run_dir / 'report.html'}")
    summary = {"success_before": before["solved"], "success_after": after["solved"], "turns_mean": after["turns"],
               "tool_calls": after["tool_calls"], "tool_failures": after["tool_failures"], "seconds": seconds}
    write_atomically(directory / "summary.json", json.dumps(summary, indent=1).encode())
    return summary
