"""What the README and docs/ tell people to type exists, and every relative link in them leads somewhere."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.cli.stage import split_arguments
from rlhf_ray.config.derived import placements_of
from rlhf_ray.config.load import STAGES, load
from tests.pages import PAGES, ROOT, fences

OWN_RUN, COMING_FROM = ROOT / "docs/own_run.md", ROOT / "docs/coming_from.md"
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_YAML = re.compile(r"^```yaml[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"")
SETTING = re.compile(r"^[A-Z_][A-Z0-9_]*=")


def code_lines(page: Path) -> list[str]:
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands(program: str) -> list[str]:
    """Distinct command lines of `program` in all pages' code blocks, without prompt, settings and comments."""
    found = set()
    for page in PAGES:
        for line in code_lines(page):
            words = line.strip().removeprefix("$ ").split(" # ")[0].split()
            while words and SETTING.match(words[0]):
                words.pop(0)
            if words and words[0].rpartition("/")[2] == program:
                found.add(" ".join(words[1:]))
    return sorted(found)


def recipes() -> dict[str, str]:
    """The YAML blocks of `own_run.md` that begin with `# stage.yaml`, by stage."""
    blocks = YAML.findall(OWN_RUN.read_text(encoding="utf-8"))
    named = {m[1].replace("_", "-"): block for block in blocks if (m := re.match(r"# (\w+)\.yaml", block))}
    return {stage: block for stage, block in named.items() if stage in STAGES}


def fragments() -> list[str]:
    """Its other YAML blocks: parts of a PPO configuration."""
    blocks = YAML.findall(OWN_RUN.read_text(encoding="utf-8"))
    return [block for block in blocks if not block.startswith("# ")]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.+?)\s*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_patterns_find_what_they_should(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n```sh\n$ X=1 make test\n.venv/bin/rlhf-ray ppo c.yaml # now\n```\n[a](b.md#c)\n")
    monkeypatch.setitem(globals(), "PAGES", [page])
    assert commands("make") == ["test"]
    assert commands("rlhf-ray") == ["ppo c.yaml"]
    assert anchors(page) == {"a-b-c"}
    assert LINK.findall(page.read_text()) == [("b.md#c", "")]


def test_make_commands_exist():
    for arguments in commands("make"):
        answer = subprocess.run(["make", "-n", *shlex.split(arguments)], cwd=ROOT, capture_output=True, text=True,
                                timeout=30)
        assert answer.returncode == 0, answer.stderr


def test_the_patches_in_the_guides_apply(tmp_path):
    """`git apply` takes the text of a page; this page's text is its only copy, and code that it changes moves."""
    patches = [text for page in PAGES for text in DIFF.findall(page.read_text(encoding="utf-8"))]
    assert patches
    for number, text in enumerate(patches):
        file = tmp_path / f"{number}.patch"
        file.write_text(text, encoding="utf-8")
        answer = subprocess.run(["git", "apply", "--check", str(file)], cwd=ROOT, capture_output=True, text=True,
                                timeout=30)
        assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_that_are_not_run_name_what_runs_them_or_what_they_need(page):
    """All others are run by `tests/slow/test_pages.py`. A test that is named knows the subcommands."""
    comments = re.findall(r"^<!-- not run here: (.+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    not_run = [fence for fence in fences(page) if fence.language == "sh" and fence.why_not_run]
    assert comments == [fence.why_not_run for fence in not_run]
    for fence in not_run:
        if fence.why_not_run.startswith("tests/"):
            tests = "".join((ROOT / test).read_text(encoding="utf-8") for test in fence.why_not_run.split(", "))
            names = re.findall(r"rlhf-ray ([a-z][a-z-]+)", fence.text)
            assert [name for name in names if not re.search(rf"(rlhf-ray |[\"']){name}\b", tests)] == []


def runs_of(page: Path) -> set[str]:
    """Directories of the runs that a page starts."""
    text = "\n".join(fence.text for fence in fences(page) if fence.file or fence.language == "sh")
    return {found for found in re.findall(r"run\.dir=(runs/\S+)|^run: {dir: (runs/[^,}]+)", text, re.MULTILINE)
            for found in found if found}


def test_no_two_pages_start_the_same_run():
    """A directory that holds a run is refused."""
    pages = {page: runs_of(page) for page in PAGES}
    assert len(pages[OWN_RUN]) > 5
    assert {(run, page.name) for page, runs in pages.items() for other, others in pages.items()
            for run in runs & others if page != other} == set()


def by_subcommand() -> dict[str, list[str]]:
    """Command lines of `rlhf-ray` by subcommand ("jobs list", "ppo"); under "" those without one."""
    groups = {group.name for group in app.registered_groups}
    found: dict[str, list[str]] = {}
    for arguments in commands("rlhf-ray"):
        words = shlex.split(arguments)[:2]
        name = words[0] if words and not words[0].startswith("-") and not words[0].isupper() else ""
        found.setdefault(" ".join(words) if name in groups else name, []).append(arguments)
    return found


@pytest.mark.parametrize(("name", "lines"), by_subcommand().items(), ids=by_subcommand())
def test_a_subcommand_and_its_options_exist(name, lines):
    answer = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0, answer.output
    for arguments in lines:
        for option in (word for word in shlex.split(arguments) if re.fullmatch(r"--[a-z-]+(=.*)?", word)):
            assert option.partition("=")[0] in answer.output, f"rlhf-ray {arguments}: no option {option}"


@pytest.mark.parametrize("stage", [name for name in by_subcommand() if name in STAGES])
def test_overrides_on_command_lines_are_accepted(stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments in (line for line in by_subcommand()[stage] if " configs/" in line):
        path, overrides = split_arguments([word for word in shlex.split(arguments)[1:] if word != "--resume"])
        assert overrides
        load(STAGES[stage], path, overrides)


def yaml_blocks() -> list[tuple[str, str]]:
    """(page and number, text) of every YAML block outside the guides, which `tests/slow/test_pages.py` runs."""
    pages = (page for page in PAGES if page.parent.name != "guides")
    return [(f"{page.relative_to(ROOT)}-{number}", text) for page in pages
            for number, text in enumerate(ANY_YAML.findall(page.read_text(encoding="utf-8")), start=1)]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in yaml_blocks()])
def test_a_yaml_block_is_a_configuration_or_what_changes_one(text, tmp_path):
    """The sections that a block lacks are those of the PPO configuration in the README, without its learners'."""
    (readme,) = YAML.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    stage = next((name for name in STAGES if text.startswith(f"# {name.replace('-', '_')}.yaml")), "ppo")
    needed = {name for name, field in STAGES[stage].model_fields.items() if stage == "ppo" or field.is_required()}
    others = {name: section for name, section in yaml.safe_load(readme).items()
              if name in needed - {"policy", "critic"}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(others | yaml.safe_load(text)))
    load(STAGES[stage], file, [])


def test_our_options_beside_those_of_other_systems_exist():
    rows = re.findall(r"^\|.*\|$", COMING_FROM.read_text(encoding="utf-8"), re.MULTILINE)[2:]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[5]) if "." in name]
    reference = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert len(named) > 40 and not set(named) - set(re.findall(r"^\| `([\w.]+)`", reference, re.MULTILINE))


@pytest.fixture
def eight_gpus(tmp_path):
    """The PPO configuration of `own_run.md` with its lines for eight GPUs."""
    (lines,) = (text for text in fragments() if "pools" in yaml.safe_load(text))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(recipes()["ppo"]) | yaml.safe_load(lines)))
    return file


def test_the_pools_of_an_own_run_hold_their_roles(eight_gpus):
    config = load(STAGES["ppo"], eight_gpus, [])
    assert config.pools.keys() == {"rollouts", "learners", "scorers"}
    assert sum(pool.bundles * pool.gpus for pool in config.pools.values()) == 8  # as the page says


def test_the_eight_gpus_hold_an_8b_model_and_compute_in_bfloat16(eight_gpus):
    answer = CliRunner().invoke(app, [
        "plan", str(eight_gpus), "--nodes", "1x8xH100", "--model.path=allenai/Llama-3.1-Tulu-3-8B-SFT",
        "--rewards.quality.path=Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"])
    assert answer.exit_code == 0 and "the run fits" in answer.output and "float32" not in answer.output, answer.output


def test_the_estimator_of_an_own_run_needs_no_critic(tmp_path):
    (lines,) = (text for text in fragments() if "algorithm" in yaml.safe_load(text))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(recipes()["ppo"]) | yaml.safe_load(lines)))
    config = load(STAGES["ppo"], file, [])
    assert config.algorithm.kl.placement == "loss" and "critic" not in placements_of(config)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in (a or b for a, b in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"
