"""The table of docs/models.md: what works with each family of `tests/tiny_families.py`, as `check-model` finds it.

`python -m tests.model_table docs/models.md` checks every family and writes the table; with names of families, their
rows. `tests/slow/test_model_table.py` holds the page against the same checks.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.stages.check_model import PARTS, outcomes_here, outcomes_of
from tests.models import make_tiny_tokenizer
from tests.tiny_families import DECODERS, SHAPE, config_of, randomised

FAMILIES = [family for family, shape in DECODERS.items() if "mamba_d_head" not in shape]
"""Those of the table: all but recurrent ones, whose generation is not verified."""
COLUMNS = {"SFT, process reward model": "log-probabilities", "critic, reward model": "scalar head", "LoRA": "LoRA",
           "generation": "generation", "PPO: new weights for vLLM": "new weights for vLLM"}
"""Columns of the table, and the row of `check-model` that each shows."""
BEGIN, END = "<!-- families -->", "<!-- /families -->"
TOKENS = 64
PASSES = ("passes", "scalar", "lora")
WIDER = {"hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "head_dim": 32,
         "max_position_embeddings": TOKENS, "n_positions": TOKENS, "max_seq_len": TOKENS}
"""In place of the tiny shapes' own, whose heads are too small for vLLM's attention on CPUs."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                    "tie_word_embeddings": False},
    "falcon": {"alibi": False},
    "gpt_oss": {"tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "truncate": False}},
    **{name: {"use_sliding_window": False} for name in ("qwen2", "qwen2_moe")},
}
"""Settings of published models of a family that its tiny shape has otherwise."""
Cells = tuple[str, ...]
"""What each column says of a family: "works", "works, padded", "fails", "refused: why", or "-" if it was not
checked."""


def make_model(family: str, directory: Path) -> ModelConfig:
    """Save a tiny random model of a family and a tokenizer."""
    from transformers import AutoModelForCausalLM

    shape = {name: WIDER.get(name, value) for name, value in DECODERS[family].items()} | PUBLISHED.get(family, {})
    model = randomised(AutoModelForCausalLM.from_config(config_of(family, **shape)))
    model.save_pretrained(directory)
    make_tiny_tokenizer(directory, SHAPE["vocab_size"])
    return ModelConfig(path=str(directory))


@cache
def cells_of(family: str) -> Cells:
    """What works with a family."""
    with tempfile.TemporaryDirectory(prefix="model-table-") as directory:
        model = make_model(family, Path(directory))
        outcomes = {o.name: o for name in PASSES for o in outcomes_here(PARTS[name], model, TOKENS)}
        outcomes |= {o.name: o for o in outcomes_of(PARTS["generation"], model, TOKENS)}
    for outcome in outcomes.values():
        if outcome.verdict != "works":
            print(f"{family}: {outcome.name} {outcome.verdict}: {outcome.detail}", file=sys.stderr)
    cells = []
    for name in COLUMNS.values():
        outcome = outcomes[name]
        reason = f": {outcome.detail}" if outcome.verdict == "refused" else ""
        padded = ", padded" if outcome.numbers.get("padded") else ""
        cells.append("-" if outcome.verdict == "not checked" else outcome.verdict + padded + reason)
    return tuple(cells)


def table_of(found: Mapping[str, Cells]) -> str:
    """The table in Markdown: families with the same cells share a row; reasons are notes below."""
    notes: dict[str, int] = {}

    def shown(cell: str) -> str:
        verdict, _, reason = cell.partition(": ")
        return f"{verdict} ({notes.setdefault(reason, len(notes) + 1)})" if reason else verdict

    rows: dict[Cells, list[str]] = {}
    for family, cells in sorted(found.items(), key=lambda item: (sum(c != "works" for c in item[1]), item[0])):
        rows.setdefault(cells, []).append(f"`{family}`")
    lines = [["family", *COLUMNS], ["---"] * (1 + len(COLUMNS)),
             *([", ".join(names), *map(shown, cells)] for cells, names in rows.items())]
    below = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(["", *below] if below else [])])


def read_table(page: str) -> dict[str, Cells]:
    """The families of a page's table and their cells; the inverse of `table_of`."""
    text = page.partition(BEGIN)[2].partition(END)[0]
    notes = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))

    def whole(cell: str) -> str:
        verdict, _, number = cell.partition(" (")
        return f"{verdict}: {notes[number.rstrip(')')]}" if number else verdict

    found = {}
    for line in re.findall(r"^\| (`.+) \|$", text, re.MULTILINE):
        names, *cells = line.split(" | ")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), tuple(map(whole, cells)))
    return found


def main(arguments: Iterable[str]) -> None:
    """Write the page's table, or print that of the named families."""
    pages = [Path(argument) for argument in arguments if argument.endswith(".md")]
    found = {family: cells_of(family) for family in [a for a in arguments if a in FAMILIES] or FAMILIES}
    table = table_of(found)
    if not pages:
        print(table)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        known = read_table(text) if len(found) < len(FAMILIES) else {}
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{table_of({**known, **found})}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
