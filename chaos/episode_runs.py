"""The runs whose samples are episodes: their model, prompts, environments and settings.

The model is tiny and random. Its chat template is of Qwen3's kind, which writes the history again when a user speaks.
Some of its tokens are whole tool calls, so that what it samples calls tools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import agents, environments
from tests.chat_templates import CORPUS, make_chat_tokenizer
from tests.models import make_tiny_llama

VOCAB = 640
WORDS = 520
"""Tokens of texts, at most; those of templates and of tool calls follow."""
CALLS = 60
"""Tokens that call the tool `put`, each with another number."""
STOPS = 70
"""Ordinary tokens that end a turn, besides those that call a tool."""
LONGEST = 640
"""Tokens of a segment, at most."""
ROWS, HELD_OUT_ROWS = 20, 8
"""Held-out rows are two chunks, so that both runners take part in an evaluation."""
TURN_TOKENS = 12
STEP_S, EPISODE_S, BRIEF_S = 10.0, 240.0, 25.0
"""Deadlines: of a step, of an episode, and of one that may not take long."""
AGENT_S = 12.0
"""Deadline of an agent until its first request, and between two."""
NAMES = ("talk", "counter", "talk", "brief")
"""Environments of the rows, in turns."""
AGENTS = ("asker", "client", "asker", "program")
"""Agents of the rows of the runs with agents, in turns."""
AGENT_ROWS, HELD_OUT_AGENT_ROWS = 12, 4
SCHEMAS = (
    '{"type": "function", "function": {"name": "put", "description": "Add a number.", "parameters": {"type": "object", '
    '"properties": {"n": {"type": "integer", "description": "The number."}}, "required": ["n"]}, "return": ',
    '{"type": "string"}}}\n</tools>\nCalls: <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>') * 2
"""What templates write, so that the tokenizer has tokens for it."""


@dataclass(frozen=True)
class EpisodeFiles:
    """What the runs start from."""

    model: Path
    prompts: Path
    held_out: Path
    stops: list[int]
    """Tokens that end a turn."""
    agent_prompts: Path
    agent_held_out: Path


def make_episode_files(root: Path) -> EpisodeFiles:
    """Model and prompts below an existing directory."""
    model = make_tiny_llama(root / "episode_model", VOCAB, tied=False, hidden=32, heads=1, positions=LONGEST + 64)
    tokenizer = make_chat_tokenizer(model, "qwen3", (*CORPUS, *SCHEMAS), WORDS)
    calls = [environments.tool_call(n) for n in range(CALLS)]
    tokenizer.add_tokens(calls)
    tokenizer.save_pretrained(model)
    stops = [*range(30, 30 + STOPS), *tokenizer.convert_tokens_to_ids(calls)]
    return EpisodeFiles(model, _write_rows(root / "episode_prompts.jsonl", ROWS, False),
                        _write_rows(root / "episode_held_out.jsonl", HELD_OUT_ROWS, True), stops,
                        _write_rows(root / "agent_prompts.jsonl", AGENT_ROWS, False, AGENTS),
                        _write_rows(root / "agent_held_out.jsonl", HELD_OUT_AGENT_ROWS, True, AGENTS))


def _write_rows(path: Path, rows: int, held_out: bool, names: Sequence[str] = NAMES) -> Path:
    """A file of prompts, whose columns say how the environments play them."""
    lines = [{"prompt": f"count {i}", "number": i, "environment": names[i % len(names)], "turns": 2 + i % 3,
              "role": ("user", "tool", "user", "user", "tool")[i % 5], "held_out": held_out} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def episode_sections(files: EpisodeFiles) -> Mapping[str, Any]:
    """Sections that differ from those of the other runs; None leaves one out."""
    file = environments.__file__
    again = {"timeout": "retry", "environment": "retry", "retries": 6}
    each = {"max_turns": 5, "max_tokens": LONGEST, "processes": 1, "memory_mib": 1024, "on_failure": again,
            "timeout_s": {"reset": STEP_S, "step": STEP_S, "episode": EPISODE_S}}
    return {
        "model": {"path": str(files.model)}, "critic": None,
        "prompts": {"path": str(files.prompts), "max_tokens": 64},
        "evaluation": {"prompts": str(files.held_out), "limit": HELD_OUT_ROWS, "every": 3},
        "environments": {"talk": {**each, "path": f"{file}:Talk"}, "counter": {**each, "path": f"{file}:Counter"},
                         "brief": {**each, "path": f"{file}:Brief"}},
        "episode_runner": {"workers": 2},
        "rewards": {"main": {"type": "environment"}},
        "generator": {"workers": 2, "chunk": 4, "max_sequences": 8, "kv_cache_mb": 16,
                      "sampling": {"max_tokens": TURN_TOKENS, "stop_token_ids": files.stops}},
        "policy": {"micro_batch_tokens": 1024, "ema_decay": None, "optimizer": {"learning_rate": 1e-3}},
        "algorithm": {"estimator": "reinforce_pp", "epochs": 1, "kl": {"coef": 0.1, "kind": "fixed"}},
        "coordinator": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "checkpoint": {"every": 1},
    }


def brief_sections(files: EpisodeFiles) -> Mapping[str, Any]:
    """The same, where an episode of `brief` that is late is masked."""
    sections = episode_sections(files)
    brief = {**sections["environments"]["brief"], "on_failure": {"environment": "retry", "retries": 6},
             "timeout_s": {"reset": STEP_S, "episode": BRIEF_S}}
    return {**sections, "environments": {**sections["environments"], "brief": brief}}


def agent_sections(files: EpisodeFiles) -> Mapping[str, Any]:
    """The same, whose episodes are played by agents."""
    sections = episode_sections(files)
    file = agents.__file__
    again = {"timeout": "retry", "agent": "retry", "environment": "retry", "retries": 6}
    each = {"max_turns": 8, "max_tokens": LONGEST, "memory_mib": 2048, "on_failure": again,
            "timeout_s": {"reset": AGENT_S, "step": AGENT_S, "episode": EPISODE_S}}
    function = {**each, "processes": 1}
    program = {"run": [sys.executable, file], "variables": {"PYTHONPATH": str(Path(file).parents[1])}}
    return {
        **sections,
        "prompts": {"path": str(files.agent_prompts), "max_tokens": 64},
        "evaluation": {"prompts": str(files.agent_held_out), "limit": HELD_OUT_AGENT_ROWS, "every": 4},
        "environments": {"asker": {**function, "path": f"{file}:asker"},
                         "client": {**function, "path": f"{file}:client"},
                         "program": {**each, "command": program}},
    }
