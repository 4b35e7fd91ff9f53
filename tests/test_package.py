"""The package as others get it: a wheel and a source archive that hold all that they need, and install."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs" / "quickstart").glob("*.yaml"))
ASSETS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "rlhf_ray").rglob("assets/*"))
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "rlhf_ray").rglob("*.py"))

BARE = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
"""An environment that leads nobody to this checkout."""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the source archive, built from a copy of what git knows."""
    place, source = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("source")
    known = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(known, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-c", "--null", "-T", "-", "-f", source / "all.tar"], cwd=ROOT, input=names, check=True)
    subprocess.run(["tar", "-x", "-f", "all.tar"], cwd=source, check=True)
    backend = ("import sys; from setuptools import build_meta as backend; place = sys.argv[1]; "
               "backend.build_sdist(place); backend.build_wheel(place)")
    subprocess.run([sys.executable, "-c", backend, place], cwd=source, check=True, capture_output=True, timeout=120)
    return place


def test_the_wheel_holds_code_assets_and_configurations(built):
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    assert CONFIGS and ASSETS and not [path for path in [*MODULES, *ASSETS] if path not in names]
    data = "rlhf_ray-0.1.0.data/data/share/rlhf-ray/"
    assert not [path for path in CONFIGS if data + path not in names]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_source_archive_builds_what_the_wheel_is(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [path for path in [*MODULES, *ASSETS, *CONFIGS, "pyproject.toml", "README.md", "LICENSE"]
                if path not in names]


@pytest.mark.slow
def test_it_installs_into_a_fresh_environment_and_says_what_it_can(built, tmp_path):
    """Dependencies are this environment's; the package itself comes from the wheel alone."""
    venv.create(tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    site = next((tmp_path / "fresh" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet",
                    next(built.glob("*.whl"))], check=True, timeout=120, env=BARE)
    command = python.with_name("rlhf-ray")
    answer = subprocess.run([command, "--help"], env=BARE, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "") and "quickstart" in answer.stdout
    where = subprocess.run([python, "-c", "from rlhf_ray.stages import bundled_recipes as m; print(m.__file__)"],
                           env=BARE, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert where.stdout.startswith(str(site))
    assert not [path for path in CONFIGS if not (tmp_path / "fresh" / "share" / "rlhf-ray" / path).is_file()]


@pytest.mark.slow
def test_the_documented_command_makes_an_environment_in_which_the_quickstart_runs(built, tmp_path):
    """All dependencies come from the registry; only two steps of PPO are made."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(uv venv.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "dist").symlink_to(built)
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    if wheels := environment.get("PIP_FIND_LINKS"):  # uv does not read pip's setting
        environment["UV_FIND_LINKS"] = wheels.replace(" ", ",")
        block = block.replace("--torch-backend cpu ", "")
    done = subprocess.run(["bash", "-euc", block.strip() + " --run.steps=2"], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "verdict: the independent judge" in done.stdout
    assert (tmp_path / "runs/quickstart/model/config.json").exists()
    assert not list(tmp_path.glob(".venv/lib/*/site-packages/torchvision"))
