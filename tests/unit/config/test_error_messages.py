"""What a person reads when a configuration cannot run: the field, the value, the place, the fix."""

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig, ProcessRewardConfig, SFTConfig
from rlhf_ray.errors import ConfigError


def problems(cls, path, overrides=()):
    """The lines of the error, without the opening one."""
    with pytest.raises(ConfigError) as caught:
        load(cls, path, list(overrides))
    message = str(caught.value)
    assert "pydantic" not in message
    assert "http" not in message
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return [line.strip() for line in message.splitlines()[1:]] or [message]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--run.steps=0", "run.steps='0': must be at least 1 [--run.steps]"),
        ("--run.steps=1.5", "run.steps='1.5': must be a whole number [--run.steps]"),
        ("--run.steps=many", "run.steps='many': must be a whole number [--run.steps]"),
        ("--policy.optimizer.learning_rate=0", "policy.optimizer.learning_rate='0': must be greater than 0"),
        ("--policy.optimizer.learning_rate=inf", "policy.optimizer.learning_rate='inf': must be a finite number"),
        ("--policy.optimizer.betas=[0.9, x]", "policy.optimizer.betas.1='x': must be a number"),
        ("--policy.optimizer.betas=0.9", "policy.optimizer.betas='0.9': must be a list, such as [0.9, 0.95]"),
        ("--policy.zero_stage=4", "policy.zero_stage='4': must be at most 3"),
        ("--algorithm.loss.clip_low=1", "algorithm.loss.clip_low='1': must be less than 1"),
        ("--algorithm.kl.kind=adaptve", "algorithm.kl.kind='adaptve': must be one of fixed, adaptive"),
        ("--logging.tensorboard=maybe", "logging.tensorboard='maybe': must be true or false"),
        ("--run.dir=null", "run.dir=None: must be text"),
        ("--run=5", "run='5': is a section; give it keys (dir, steps, epochs, seed, upload, auto_resume)"),
        ("--pools=5", "pools='5': is a section; give it keys (names of your choice)"),
        ("--run.stepz=5", "run.stepz: unknown key; did you mean steps?"),
        ("--run.xyz=5", "run.xyz: unknown key; use one of: dir, steps, epochs, seed, upload, auto_resume"),
        ("--prompt.path=x", "prompt: unknown key; did you mean prompts?"),
        ("--steps=5", "steps: unknown key; did you mean run.steps?"),
        ("--algorithm.kl_coef=5", "algorithm.kl_coef: unknown key; did you mean algorithm.kl.coef?"),
        ("--pools.a.bundels=5", "pools.a.bundels: unknown key; did you mean bundles?"),
        ("--evaluation.every=5", "evaluation.prompts is empty and prompts.held_out=0, so the evaluation"),
        ("--rewards={a: {type: model, path: r, functoin: f}}", "rewards.a.functoin: unknown key"),
        ("--bogus", "--bogus: there is no section bogus"),
        ("--polcy", "--polcy: there is no section polcy; did you mean policy?"),
        ("--run.steps", "--run.steps has no value"),
        ("--prompts.mix=[{path: x}]", "prompts: set path, or mix with several data sets, not both"),
        ("--prompts.mix=[{weight: 2}]", "prompts.mix.0: set path, or numbered"),
        ("--prompts.mix=[{path: x, wieght: 2}]", "prompts.mix.0.wieght: unknown key; did you mean weight?"),
        ("--prompts.mix=[{path: x, weight: 0}]", "prompts.mix.0.weight=0: must be greater than 0"),
    ],
)
def test_one_wrong_value(write, override, line):
    found = problems(PPOConfig, write("ppo"), [override])
    assert len(found) == 1
    assert found[0].startswith(line)


@pytest.mark.parametrize(("cls", "override", "origin"), [
    (PPOConfig, "--generator.sampling.min_tokens=300", "--generator.sampling.min_tokens"),
    (PPOConfig, "--prompts.mix=[{path: x}]", "--prompts.mix"),
    (PPOConfig, "--prompts.mix=", "--prompts.mix"),
    (PPOConfig, "--model.trust_remote_code=true", "--model.trust_remote_code"),
    (SFTConfig, "--data.messages=m", "--data.messages"),
])
def test_what_the_command_line_gave_is_not_laid_to_the_file(write, cls, override, origin):
    file = write("sft", data={"path": "d", "prompt": "p"}) if cls is SFTConfig else write("ppo")
    assert problems(cls, file, [override])[0].endswith(f"[{origin}]")


def test_a_section_that_is_missing_names_the_key_to_begin_with(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {path: d}\n")
    line, = problems(ProcessRewardConfig, tmp_path / "c.yaml")
    assert line.startswith("steps: is required") and line.endswith("or with --steps.placeholder=...")


def test_all_problems_at_once_with_file_and_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("run:\n  steps: -1\n  dri: x\nmodel:\n  path: 3\n")
    assert problems(SFTConfig, path) == [
        f"run.steps=-1: must be at least 1 [{path}:2]",
        f"run.dri: unknown key; did you mean dir? [{path}:3]",
        f"model.path=3: must be text; put it in quotes [{path}:5]",
        "data: is required (Demonstrations); set it in the file or with --data.path=...",
    ]


def test_a_wrong_variable_is_named(write, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_POLICY__ZERO_STAGE", "9")
    assert problems(PPOConfig, write("ppo")) == [
        "policy.zero_stage='9': must be at most 3 [RLHF_RAY_POLICY__ZERO_STAGE]"
    ]


def test_a_variable_that_gives_a_section_one_value_is_named(write, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_RUN", "abc")
    (line,) = problems(PPOConfig, write("ppo"))
    assert line.startswith("run='abc': is a section; give it keys (") and line.endswith("[RLHF_RAY_RUN]")
    monkeypatch.setenv("RLHF_RAY_RUN__STEPS", "3")
    assert "RLHF_RAY_RUN__STEPS sets a key inside run" in problems(PPOConfig, write("ppo"))[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {dir: x\nmodel: 3\n", ":2, column 6: not valid YAML"),
        ("run:\n\tsteps: 3\n", ":2, column 1: not valid YAML"),
        ("- a\n- b\n", "contains a list; a configuration is a mapping of sections"),
        ("run: {steps: 3}\nrun: {seed: 3}\n", ":2: run is given twice (before at "),
        ("run:\n  steps: 3\n  steps: 4\n", ":3: run.steps is given twice"),
        ("1: x\n", "the key 1 is not text"),
        ("run: !!python/object/apply:os.getcwd []\n", "not valid YAML: could not determine a constructor"),
    ],
)
def test_a_file_that_is_not_a_configuration(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert message in problems(SFTConfig, path)[0]
    assert str(path) in problems(SFTConfig, path)[0]


def test_a_file_that_is_not_there(tmp_path):
    assert "there is no configuration file" in problems(SFTConfig, tmp_path / "none.yaml")[0]
    assert "cannot be read" in problems(SFTConfig, tmp_path)[0]


def test_an_empty_file_says_what_is_required(tmp_path):
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert [line.split(":")[0] for line in problems(SFTConfig, tmp_path / "c.yaml")] == ["model", "data"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.steps=3"], "unexpected argument 'run.steps=3'"),
        (["--run.steps"], "--run.steps has no value"),
        (["--run.steps", "--run.seed=1"], "--run.steps has no value"),
        (["--run..steps=3"], "--run..steps is not a field"),
        (["--run.steps=3", "--run.steps.x=3"], "sets a key inside steps"),
        (["--policy.optimizer.betas=[0.9"], "check its brackets"),
    ],
)
def test_arguments_that_are_no_overrides(write, overrides, message):
    assert message in problems(PPOConfig, write("ppo"), overrides)[0]
