"""`rlhf-ray check-model`: whether a model works here, part by part.

Each part that loads the model runs in a process of its own, so that a part that fails or is killed loses no other, and
each has the machine's memory to itself. A part imports its libraries there: importing this module is cheap.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.model import DType, ModelConfig
from rlhf_ray.errors import RLHFError, first_line
from rlhf_ray.models.model_families import model_family
from rlhf_ray.roles.engines.vllm_adapter import generator_environment
from rlhf_ray.stages.model_checks.outcome import Outcome, Verdict
from rlhf_ray.stages.resolve_model import model_at

TIMEOUT_S, GRACE_S = 3600.0, 10.0
"""Longest wait for a part's outcome, and for the end of its process after it."""
SMALLER = "use --dtype bfloat16 or a smaller --tokens, or a machine with more memory"


@dataclass(frozen=True)
class Part:
    """A part of the check."""

    rows: tuple[str, ...]
    """Names of the outcomes that it gives."""
    function: str
    """`module:name`; takes the model, and the longest row unless `reads_text`; returns an outcome for each of
    `rows`."""
    activity: str
    """What it does, for the progress line."""
    reads_text: bool = False
    """Whether it takes no longest row, and needs no process of its own."""
    advice: str = ""
    """What to do if it fails."""


_CHECKS = "rlhf_ray.stages.model_checks"
PARTS = {
    "tokenizer": Part(("tokenizer",), f"{_CHECKS}.text_parts:check_tokenizer", "encoding and decoding texts", True,
                      "repair the tokenizer's files, or use the ones that the model was published with"),
    "stops": Part(("stop tokens",), f"{_CHECKS}.text_parts:check_stop_tokens", "reading what ends a response", True,
                  "set `eos_token` in tokenizer_config.json"),
    "chat": Part(("chat template",), f"{_CHECKS}.text_parts:check_chat_template", "rendering a conversation", True,
                 "repair `chat_template` in the tokenizer's files, or use prompts that are plain texts"),
    "turns": Part(("several turns",), f"{_CHECKS}.text_parts:check_turns", "rendering turns and tools", True,
                  "do not use this model in environments, or repair `chat_template` in the tokenizer's files"),
    "passes": Part(("log-probabilities",), f"{_CHECKS}.pass_parts:check_passes",
                   "comparing passes with transformers' own, gradients too",
                   advice="do not train this model here; use one of a supported family (docs/models.md)"),
    "scalar": Part(("scalar head",), f"{_CHECKS}.pass_parts:check_scalar_head", "comparing values of a scalar head",
                   advice="use an estimator without a critic (algorithm.estimator: rloo or grpo) and another reward "
                          "model"),
    "lora": Part(("LoRA",), f"{_CHECKS}.pass_parts:check_adapters", "comparing adapters with merged weights",
                 advice="train all weights, or set `lora.targets` to layers that the model has"),
    "generation": Part(("generation", "new weights for vLLM"), f"{_CHECKS}.generation_part:check_generation",
                       "sampling with vLLM, before and after new weights",
                       advice="this vLLM cannot generate with the model; use one of a supported family "
                              "(docs/models.md)"),
}
"""By the names that `--skip` takes, in the order of the table."""
NOT_WORKING = frozenset({"fails", "refused", "not checked"})
"""Verdicts, unless a part was skipped on request, after which the model cannot be said to work."""


@dataclass(frozen=True)
class CheckOptions:
    """Options of the command line."""

    model: str
    skip: Sequence[str] = ()
    tokens: int = 256
    """Longest row that is compared."""
    dtype: DType | None = None
    """None is bfloat16 on a GPU and float32 without one."""
    float32_head: bool = False
    """As `ModelConfig.float32_head`."""


@dataclass(frozen=True)
class CheckReport:
    """The outcome of a check."""

    model: str
    model_type: str
    dtype: str
    outcomes: list[Outcome]
    skipped: tuple[str, ...]
    """Rows that were skipped on request."""

    @property
    def works(self) -> bool:
        """Whether every row that was not skipped works or does not apply."""
        return not any(o.verdict in NOT_WORKING and o.name not in self.skipped for o in self.outcomes)


def run(options: CheckOptions, progress: Callable[[str], None] = lambda _: None) -> CheckReport:
    """Check a model.

    Args:
        progress: is called with a line of text when a part begins.

    Raises:
        ModelError: there is no such model, or its configuration cannot be read; nothing was started.
    """
    model, notice = model_at(options.model, "MODEL", options.dtype or "auto")
    if notice:
        progress(notice)
    model = model.model_copy(update={"float32_head": options.float32_head})
    kind = model_family(model)
    outcomes: list[Outcome] = []
    skipped: list[str] = []
    for name, part in PARTS.items():
        if name in options.skip:
            skipped += part.rows
            outcomes += [Outcome(row, "not checked", f"--skip {name}") for row in part.rows]
            continue
        progress(f"{', '.join(part.rows)}: {part.activity}")
        outcomes += outcomes_of(part, model, options.tokens)
    return CheckReport(model.path, kind, model.dtype, outcomes, tuple(skipped))


def outcomes_of(part: Part, model: ModelConfig, tokens: int) -> list[Outcome]:
    """The outcomes of one part."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="check-model-") as scratch:
        outcomes = (outcomes_here(part, model, tokens) if part.reads_text
                    else _in_process(part, model, tokens, Path(scratch) / "output"))
    seconds = round(time.perf_counter() - began, 1)
    return [replace(outcome, numbers={**outcome.numbers, "seconds": seconds}) for outcome in outcomes]


def _in_process(part: Part, model: ModelConfig, tokens: int, output: Path) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, output, part, model, tokens))
    process.start()
    sending.close()
    try:
        if not receiving.poll(TIMEOUT_S):
            return _whole_part(part, "not checked", f"no outcome after {TIMEOUT_S:g} s", SMALLER)
        answer: list[Outcome] = receiving.recv()
        return answer
    except EOFError:  # the process ended without an outcome
        process.join()
        return _killed(part, process.exitcode or 0, output)
    finally:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _work(outcome: Connection, output: Path, part: Part, model: ModelConfig, tokens: int) -> None:
    """Run a part in this process, with its output in a file. The environment is set before torch is imported."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threads = len(os.sched_getaffinity(0))
    for name, value in generator_environment(GenerationConfig(engine="in_process", threads=threads)).items():
        os.environ.setdefault(name, value)
    outcome.send(outcomes_here(part, model, tokens))


def outcomes_here(part: Part, model: ModelConfig, tokens: int) -> list[Outcome]:
    """The outcomes of a part, in this process; an error that it raises becomes an outcome."""
    try:
        module, _, name = part.function.partition(":")
        check = getattr(importlib.import_module(module), name)
        outcomes: list[Outcome] = check(model, *([] if part.reads_text else [tokens]))
        return outcomes
    except RLHFError as error:
        return _whole_part(part, "fails", str(error), part.advice)
    except ImportError as error:
        return _whole_part(part, "not checked", f"{type(error).__name__}: {first_line(error)}", "rlhf-ray doctor")
    except MemoryError:
        return _whole_part(part, "not checked", "out of memory", SMALLER)
    except Exception as error:  # transformers and vLLM raise anything for a model that they do not understand
        if type(error).__name__ == "OutOfMemoryError":
            return _whole_part(part, "not checked", f"out of memory: {first_line(error)}", SMALLER)
        return _whole_part(part, "fails", f"{type(error).__name__}: {first_line(error)}", part.advice)


def _killed(part: Part, exit_code: int, output: Path) -> list[Outcome]:
    """The outcomes of a part whose process ended early."""
    if exit_code == -signal.SIGKILL:
        return _whole_part(part, "not checked", "its process was killed (SIGKILL), probably for memory", SMALLER)
    written = output.read_text(errors="replace").strip().splitlines() if output.is_file() else []
    ended = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    return _whole_part(part, "fails", ": ".join([f"its process ended with {ended}", *written[-1:]]), part.advice)


def _whole_part(part: Part, verdict: Verdict, detail: str, advice: str) -> list[Outcome]:
    """The outcomes of a part that gave none itself: this one for its first row, on which its other rows depend."""
    first, *others = part.rows
    return [Outcome(first, verdict, detail, advice), *(Outcome(row, "not checked", f"needs {first}") for row in others)]
