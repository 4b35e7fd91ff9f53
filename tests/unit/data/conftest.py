"""One real set of reviews and one real tokenizer for all tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.data.synthetic_reviews import ReviewFiles, write_reviews
from rlhf_ray.data.tokenizer import train_tokenizer

WriteRows = Callable[..., str]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def review_files(tmp_path_factory: pytest.TempPathFactory) -> ReviewFiles:
    """The quickstart's data at full size."""
    return write_reviews(tmp_path_factory.mktemp("reviews"), seed=0)


@pytest.fixture(scope="session")
def review_texts(review_files: ReviewFiles) -> list[str]:
    return [row["text"] for row in read_lines(review_files.sft)]


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory, review_texts: list[str]) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(review_texts, 1024, directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Any:
    """The 1,024-token BPE, loaded from disk as a user would."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_directory)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteRows:
    """Write rows (objects, or ready-made lines) to a file and return its path."""

    def write(*rows: dict[str, Any] | str, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write
