"""What the container images promise, read off their files: an ordinary user, pinned bases, no secrets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*Dockerfile"))
BY_VERSION = "nvidia/cuda:13.0.1-devel-ubuntu22.04"
"""The base whose digest nobody has looked up yet; docker/README.md says how."""
SECRET = re.compile(r"token|secret|passw|api_?key|credential", re.I)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, its text) of a Dockerfile, lines that go on joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)).splitlines()
    return [(line.split()[0].upper(), line.partition(" ")[2].strip()) for line in lines if line.strip()]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def image(request):
    return instructions(request.param)


def test_there_are_two():
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


def test_the_last_stage_ends_as_an_ordinary_user(image):
    last = [name for name, _ in image]
    last_stage = image[len(last) - 1 - last[::-1].index("FROM"):]
    users = [text for name, text in last_stage if name == "USER"]
    assert users and users[-1] == "1000" and "useradd --create-home --uid 1000 trainer" in str(image)


def test_bases_are_pinned(image):
    own = {text.rpartition(" AS ")[2] for name, text in image if name == "FROM" and " AS " in text}
    bases = [text.partition(" AS ")[0] for name, text in image if name == "FROM"]
    bases += [found[1] for name, text in image if name == "COPY" and (found := re.match(r"--from=(\S+)", text))]
    bases = {base for base in bases if base not in own}
    assert bases and all(re.search(r":v?\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$", base)
                         for base in bases - {BY_VERSION}), bases


def test_no_secret_is_baked_in(image):
    """ARG and ENV stay readable in an image's history."""
    assert not [text for name, text in image if name in ("ARG", "ENV") and SECRET.search(text)]
    assert not [text for name, text in image if name == "ADD"], "ADD fetches and unpacks; COPY does not"


def test_dependencies_come_by_hash_and_before_our_code(image):
    """The layer that is large and changes seldom must not be made again for a change of ours."""
    texts = [f"{name} {text}" for name, text in image]
    locked = next(i for i, text in enumerate(texts) if "--require-hashes" in text)
    code = next(i for i, text in enumerate(texts) if text.startswith("COPY") and " rlhf_ray " in text)
    assert locked < code


def test_every_file_that_is_copied_is_there(image):
    sources = [part for name, text in image if name == "COPY" and "--from" not in text
               for part in text.split()[:-1] if not part.startswith("--")]
    assert sources and not [source for source in sources if not (ROOT / source).exists()]


def test_health_is_what_the_doctor_says(image):
    assert [text for name, text in image if name == "HEALTHCHECK" and '"rlhf-ray", "doctor"' in text]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(path):
    """hadolint, which the test extra brings; https://github.com/hadolint/hadolint names the rules."""
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed: make install-test")
    answer = subprocess.run([linter, "--no-color", path], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_what_is_no_part_of_the_image_is_left_out():
    assert {".git", ".venv", "runs"} <= set((ROOT / ".dockerignore").read_text().split())
