"""What examples have in common: a tokenizer made for their demonstrations, the two stages imitation and reinforcement
learning, and their verdict."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.data.row_readers import read_rows
from rlhf_ray.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from rlhf_ray.data.tool_template import TOOL_TAGS, TURN_END, TURN_START, give_tool_template
from rlhf_ray.environments.adapters import brought
from rlhf_ray.environments.protocol import Message
from rlhf_ray.errors import ConfigError
from rlhf_ray.files.writing import json_lines, write_atomically
from rlhf_ray.observability.run_directory import read_json
from rlhf_ray.observability.tables import changes, print_before_after, print_texts
from rlhf_ray.stages import ppo, sft
from rlhf_ray.stages.bundled_recipes import Recipe, refuse_other_start, run_once, timed
from rlhf_ray.stages.preflight import check_engine

VOCABULARY, RARE, READ = 1024, 100, 2_000
"""At most so many tokens; how often two tokens must be neighbours in how many demonstrations to become one: parts of
tasks that differ are not."""


def run_stages(
    recipe: Recipe, name: str, directory: Path, seed: int, estimator: str, overrides: list[str],
    make_data: Callable[[Path, int], None],
) -> tuple[Path, dict[str, float]]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        name: of the example.
        overrides: `--section.key=value` changes of the reinforcement learning.
        make_data: writes the data of a seed below a directory, unless they exist.

    Returns:
        The directory of the reinforcement learning, and the seconds of each stage.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    if not (recipe.folder() / f"{estimator}.yaml").is_file():
        raise ConfigError(f"the example {name} has no --estimator {estimator}; leave it out, which means grpo")
    began = time.perf_counter()
    config: Any = recipe.config("ppo", directory, seed, overrides, file=estimator)
    check_engine(config.cluster, config.generator)
    refuse_other_start(directory, seed)
    seconds = {"data": timed(lambda: make_data(directory, seed))}
    with ray_session(ClusterConfig(), {"default": PoolConfig(cpus=2)}, name):
        seconds["SFT"] = run_once("sft", lambda: sft.run(recipe.config("sft", directory, seed), True),
                                  directory / "sft")
        seconds[estimator] = run_once(estimator, lambda: ppo.run(config, True), Path(config.run.dir))
    seconds["in all, with Ray's start"] = max(time.perf_counter() - began, sum(seconds.values()))
    return Path(config.run.dir), seconds


def environment_of(recipe: Recipe, name: str) -> type:
    """The class of an environment of a recipe's `grpo.yaml`, as the policy meets it.

    Raises:
        ConfigError: its library is not installed.
    """
    environment = recipe.config("ppo", Path(recipe.home), 0, file="grpo").environments[name]
    try:
        return cast(type, brought(*environment.source))
    except ImportError as error:
        raise ConfigError(str(error)) from None


def print_verdict(run_dir: Path, seconds: Mapping[str, float], measure: str, named: str, shown: Sequence[str]
                  ) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Print the held-out results before and after: a table, three texts and a sentence. Returns both.

    Args:
        measure: metric of the sentence, a share.
        named: what it is a share of.
        shown: metrics of the table.
    """
    evaluation = read_json(run_dir / "evaluation.json")
    before, after = evaluation["before"], evaluation["after"]
    print_before_after(changes(*({name: side[name] for name in shown if name in side} for side in (before, after))))
    print_texts(evaluation["texts"][:3])
    print(f"verdict: {before[measure]:.1%} of {named} before, {after[measure]:.1%} after")
    print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    print(f"model: {run_dir / 'model'}\nreport: {run_dir / 'report.html'}")
    return before, after


def make_demonstrations(directory: Path, doing: str, demonstrations: Callable[[], Iterable[list[Message]]],
                        words: Sequence[str]) -> None:
    """Write demonstrations and a tokenizer with a chat template, unless they exist.

    Args:
        doing: what making them is, in words.
        words: as of `make_chat_tokenizer`.
    """
    data = directory / "data"
    if (data / "tokenizer" / "chat_template.jinja").is_file():
        return
    print(f"data: {doing}")
    rows = json_lines({"messages": messages} for messages in demonstrations())
    data.mkdir(parents=True, exist_ok=True)
    (data / "sft.jsonl").write_bytes(rows)
    make_chat_tokenizer(data / "tokenizer", data / "sft.jsonl", words)


def make_chat_tokenizer(directory: Path, demonstrations: Path, words: Sequence[str]) -> None:
    """Train a tokenizer with a chat template for demonstrations, and save it to `directory`.

    Args:
        demonstrations: {"messages", "tools"} a line, of which `tools` may be missing.
        words: get a token each, wherever they stand.
    """
    from transformers import AddedToken

    train_tokenizer([], SMALLEST_VOCABULARY, directory)
    texts = list(_texts(demonstrations, directory, words))
    train_tokenizer(texts, VOCABULARY, directory, across_words=True, min_frequency=RARE)
    tokenizer = give_tool_template(directory)
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in words])
    tokenizer.save_pretrained(directory)


def _texts(demonstrations: Path, tokenizer: Path, words: Sequence[str]) -> Iterator[str]:
    """What stands between the template's tokens and the words in the first demonstrations."""
    template = give_tool_template(tokenizer)
    alone = [rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(words, key=len, reverse=True)]
    tags = re.compile("|".join([*map(re.escape, (TURN_START, TURN_END, *TOOL_TAGS)), *alone]))
    for row in read_rows(str(demonstrations), "train", READ).records:
        yield from tags.split(str(template.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False)))


def write_verdict(directory: Path, run_dir: Path, seconds: dict[str, float], solved: str, shown: Sequence[str],
                  kept: Mapping[str, str]) -> dict[str, Any]:
    """Print the held-out results before and after: a table, three texts and a sentence; and write summary.json.

    Args:
        solved: what success is, in words.
        shown: metrics of the table.
        kept: key of the summary -> metric after.
    """
    before, after = print_verdict(run_dir, seconds, "solved", solved, shown)
    summary = {"success_before": before["solved"], "success_after": after["solved"],
               **{key: after[metric] for key, metric in kept.items()}, "seconds": seconds}
    write_atomically(directory / "summary.json", json.dumps(summary, indent=1).encode())
    return summary
