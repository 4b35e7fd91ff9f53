"""What is refused of environments before anything starts."""

import json

import pytest

from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError, DataError, EnvironmentFailed, ModelError
from rlhf_ray.stages.environment_preflight import check_environments, in_words
from tests.chat_templates import make_chat_tokenizer
from tests.models import make_tiny_llama

CODE = """
def add(a: int, b: int) -> int:
    \"\"\"Add.

    Args:
        a: One.
        b: Another.
    \"\"\"
    return a + b


class Shop:
    def reset(self, price: int) -> None:
        self.price = price

    def look(self) -> int:
        \"\"\"Price.\"\"\"
        return self.price


class Once(Shop):
    replayable = False


def asks(row, session):
    return 1


class Kept(Once):
    def snapshot(self): return self.price
    def restore(self, price): self.price = price
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("environments")
    (root / "env.py").write_text(CODE)
    for kind in ("qwen2.5", "gemma"):
        make_tiny_llama(root / kind, 448)
        make_chat_tokenizer(root / kind, kind)
    make_tiny_llama(root / "plain", 448)
    rows = [{"prompt": "how much?", "price": i, "environment": "one"} for i in range(3)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def config(root, environments, model="qwen2.5", **more):
    return PPOConfig(model={"path": str(root / model)}, prompts={"path": str(root / "rows.jsonl"), "max_tokens": 64},
                     environments=environments, **more)


def test_environments_that_can_be_used_are_accepted(root):
    check_environments(config(root, {"one": {"path": f"{root}/env.py:add"}, "two": {"path": f"{root}/env.py:Shop"}}))


def test_a_name_that_the_file_has_not_is_refused(root):
    with pytest.raises(EnvironmentFailed, match=r"environments\.one.* has no attribute 'Nothing'"):
        check_environments(config(root, {"one": {"path": f"{root}/env.py:Nothing"}}))


def test_a_row_with_which_it_cannot_begin_is_refused(root):
    (root / "other.jsonl").write_text('{"prompt": "how much?", "cost": 3}\n')
    wrong = config(root, {"one": {"path": f"{root}/env.py:Shop"}})
    wrong = wrong.model_copy(update={"prompts": wrong.prompts.model_copy(update={"path": str(root / "other.jsonl")})})
    with pytest.raises(ConfigError, match=r"environments\.one fails with a row of the data.*price"):
        check_environments(wrong)


GUESS = """
class Guess:
    def reset(self, row, seed):
        assert row == {"prompt": "", "index": 0}, row
        return {"messages": [{"role": "user", "content": "Guess."}]}

    def step(self, reply):
        return {"done": True}
"""


def test_a_numbered_row_is_accepted_where_the_environment_gives_the_first_message(root):
    (root / "guess.py").write_text(GUESS)
    numbered = {"prompts": {"numbered": 3, "max_tokens": 64}}
    check_environments(PPOConfig(model={"path": str(root / "qwen2.5")}, **numbered,
                                 environments={"one": {"path": f"{root}/guess.py:Guess"}}))
    with pytest.raises(ConfigError, match=r"environments\.one fails with a row of the data.*has nothing to read"):
        check_environments(PPOConfig(model={"path": str(root / "qwen2.5")}, **numbered,
                                     environments={"one": {"path": f"{root}/env.py:add"}}))


def test_a_library_that_is_not_installed_is_named_with_its_extra(root, monkeypatch):
    for name in ("gymnasium", "reasoning_gym"):
        (root / "blocked" / name).mkdir(parents=True, exist_ok=True)
        (root / "blocked" / name / "__init__.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    monkeypatch.setenv("PYTHONPATH", str(root / "blocked"), prepend=":")
    for source, extra in (({"gymnasium": {"id": "FrozenLake-v1"}}, "gymnasium"),
                          ({"reasoning_gym": {"task": "chain_sum"}}, "reasoning-gym")):
        with pytest.raises(EnvironmentFailed, match=rf"environments\.one.* pip install 'rlhf-ray\[{extra}\]'"):
            check_environments(config(root, {"one": source}))


def test_a_row_that_names_no_environment_is_refused(root):
    environments = {"two": {"path": f"{root}/env.py:add"}, "three": {"path": f"{root}/env.py:Shop"}}
    with pytest.raises(DataError, match=r"'environment' \(episode_runner\.column\) is 'one'.* two, three"):
        check_environments(config(root, environments))


def test_a_model_without_a_chat_template_is_refused(root):
    with pytest.raises(ModelError, match="no chat template"):
        check_environments(config(root, {"one": {"path": f"{root}/env.py:add"}}, model="plain"))


def test_a_template_that_knows_no_tools_is_refused(root):
    with pytest.raises(ModelError, match=r"environments\.one: there are tools"):
        check_environments(config(root, {"one": {"path": f"{root}/env.py:add"}}, model="gemma"))


def test_an_unknown_format_of_tool_calls_is_refused_by_its_field(root):
    with pytest.raises(ConfigError, match=r"environments\.one\.tool_format='smoke'"):
        check_environments(config(root, {"one": {"path": f"{root}/env.py:add", "tool_format": "smoke"}}))


@pytest.mark.parametrize("name, kept", [("Shop", ""), ("Once", ", not replayable"), ("Kept", ", with snapshots")])
def test_a_loaded_environment_is_described_with_its_shape_its_tools_and_how_it_is_brought_back(root, name, kept):
    import asyncio

    from rlhf_ray.environments.pool import EnvironmentPool

    async def facts():
        pool = EnvironmentPool("shop", config(root, {"shop": {"path": f"{root}/env.py:{name}"}}).environments["shop"])
        try:
            return await pool.start()
        finally:
            await pool.stop()

    words = in_words("shop", asyncio.run(facts()))
    assert words.startswith(f"environments.shop is a class with tools (look){kept}: ") and f"class {name}" in words


def warnings_of(caplog):
    """Our own: other tests have let asyncio's loggers speak."""
    return [each.message for each in caplog.records if each.name.startswith("rlhf_ray")]


def test_an_agent_is_described_and_its_program_s_columns_are_looked_for(root, caplog):
    from rlhf_ray.environments.hosts import EnvironmentFacts

    check_environments(config(root, {"one": {"path": f"{root}/env.py:asks"}}))
    check_environments(config(root, {"one": {"command": ["echo", "{price}", "{prompt}", "{seed}"]}}))
    with pytest.raises(ConfigError, match=r"environments\.one\.command: its arguments name the column 'cost', which"):
        check_environments(config(root, {"one": {"command": ["echo", "{price}", "{cost}"]}}))
    assert not warnings_of(caplog)
    facts = EnvironmentFacts("agent", [], True, "env.py:3: def asks(row, session):", [])
    assert in_words("one", facts) == "environments.one is an agent: env.py:3: def asks(row, session):"


@pytest.mark.parametrize("host, name, warned", [
    ("0.0.0.0", "asks", True), ("10.0.0.7", "asks", True), ("127.0.0.1", "asks", False), ("::1", "asks", False),
    ("0.0.0.0", "add", False)])
def test_a_gateway_that_others_reach_is_a_warning(root, caplog, host, name, warned):
    check_environments(config(root, {"one": {"path": f"{root}/env.py:{name}"}},
                              episode_runner={"gateway_host": host}))
    found = [f"episode_runner.gateway_host='{host}' lets in" in each for each in warnings_of(caplog)]
    assert found == [True] * warned
