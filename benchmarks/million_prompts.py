"""`python -m benchmarks.million_prompts`: what a million prompts cost in seconds and in memory.

Writes a file of prompts, lets a prompt reader open it in a separate process as a run does, and asks it for chunks in
the order in which a run would visit them. USS is memory that is a process's own, mapped pages that only it has touched
included: what ending it would give back to the machine. It must not grow with the data.
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

SEED = 0
WORDS_A_PROMPT = (15, 45)
CHUNK = 64
"""Rows asked for at a time."""


class Memory(NamedTuple):
    """Of one process, in bytes."""

    rss: int
    uss: int

    @classmethod
    def now(cls) -> "Memory":
        """This process's."""
        info = psutil.Process().memory_full_info()
        return cls(info.rss, info.uss)


def words() -> list[str]:
    """A vocabulary of two thousand made-up words."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    chance = random.Random(SEED)
    return ["".join(chance.choices(syllables, k=chance.choice([1, 2, 2, 3]))) for _ in range(2000)]


def write_prompts(file: Path, rows: int) -> None:
    """Prompts with a column beside them, as an answer to check would be."""
    chance, vocabulary = random.Random(SEED), words()
    with file.open("w", encoding="utf-8") as out:
        for number in range(rows):
            text = " ".join(chance.choices(vocabulary, k=chance.randint(*WORDS_A_PROMPT)))
            out.write(json.dumps({"prompt": text, "answer": number}) + "\n")


def make_tokenizer(file: Path, directory: Path) -> None:
    """A tokenizer for such prompts."""
    from rlhf_ray.data.tokenizer import train_tokenizer

    with file.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line, _ in zip(lines, range(5000), strict=False)]
    train_tokenizer(texts, 2048, directory)


def reader(connection: Connection, model: Path, data: Path) -> None:
    """The reader's process: opens the data, then answers rows until it hears None; sends its memory each time."""
    from rlhf_ray.config.data import PromptsConfig
    from rlhf_ray.config.model import ModelConfig
    from rlhf_ray.roles.data_readers import PromptReader

    role = PromptReader(ModelConfig(path=str(model)), data.parent)
    role.start()
    connection.send(Memory.now())
    began = time.perf_counter()
    found = role.open("training", PromptsConfig(path=str(data), max_tokens=256))
    connection.send((found, time.perf_counter() - began, Memory.now()))
    while (numbers := connection.recv()) is not None:
        connection.send(role.rows(numbers))
    connection.send(Memory.now())


def measure(directory: Path, rows: int, visits: int) -> dict[str, Any]:
    """All figures of one run."""
    data, model = directory / "prompts.jsonl", directory / "tokenizer"
    write_prompts(data, rows)
    make_tokenizer(data, model)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=reader, args=(theirs, model, data), daemon=True)
    process.start()
    started: Memory = ours.recv()
    found, seconds, opened = ours.recv()
    driver, visit_seconds = visit(ours, found["sizes"], visits)
    ours.send(None)
    visited: Memory = ours.recv()
    process.join(60)
    return {"rows": sum(found["sizes"]), "file_bytes": data.stat().st_size, "table_bytes": found["bytes"],
            "open_seconds": seconds, "visits": visits, "visit_seconds": visit_seconds, "driver": driver,
            "reader": {"started": started, "opened": opened, "visited": visited}}


def visit(connection: Connection, sizes: list[int], visits: int) -> tuple[dict[str, Memory], float]:
    """Ask for `visits` rows in a run's order, chunk by chunk.

    Returns:
        the driver's memory before, with the order of visits, and after; the seconds.
    """
    from rlhf_ray.data.cursor import PromptCursor

    memory = {"before": Memory.now()}
    cursor = PromptCursor(sizes, SEED, shuffle=True)
    cursor.next(1)
    memory["with_order"] = Memory.now()
    began = time.perf_counter()
    for _ in range(visits // CHUNK):
        connection.send([row for _, row in cursor.next(CHUNK)])
        connection.recv()
    seconds = time.perf_counter() - began
    memory["after"] = Memory.now()
    return memory, seconds


def report(found: dict[str, Any]) -> str:
    """The figures in words."""
    def line(name: str, memory: Memory) -> str:
        return f"  {name:<34} RSS {memory.rss / 2**20:7.0f} MiB   USS {memory.uss / 2**20:7.0f} MiB"

    reader_, driver = found["reader"], found["driver"]
    return "\n".join([
        f"{found['rows']:,} prompts, {found['file_bytes'] / 2**20:.0f} MiB of JSON lines, a table of "
        f"{found['table_bytes'] / 2**20:.0f} MiB",
        f"opened in {found['open_seconds']:.0f} s; {found['visits']:,} rows visited in {found['visit_seconds']:.1f} s",
        line("reader, tokenizer loaded", reader_["started"]), line("reader, prompts opened", reader_["opened"]),
        line("reader, rows visited", reader_["visited"]), line("driver, before", driver["before"]),
        line("driver, order of visits known", driver["with_order"]), line("driver, rows visited", driver["after"]),
    ])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million_prompts", description=__doc__)
    parser.add_argument("--rows", type=int, default=10**6, help="prompts to write (default: %(default)s)")
    parser.add_argument("--visits", type=int, default=100_000, help="rows to ask for (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=None, help="a disk for the files; not one that is memory")
    asked = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-million-", dir=asked.directory) as temporary:
        print(report(measure(Path(temporary), asked.rows, asked.visits)))


if __name__ == "__main__":
    main()
