"""What goes with a submitted run."""

import json
import subprocess

import pytest

from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.errors import ConfigError, DataError, ModelError
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.stages.submission_checks import (
    about_run,
    check_before_submission,
    check_plan,
    digest,
    git_commit,
    new_job_id,
    variables_of,
)
from tests.models import make_tiny_llama


def config_of(tmp_path, **changes):
    settings = {"run": {"dir": "/shared/runs/a b"}, "data": {"path": str(tmp_path / "d.jsonl")},
                "model": {"path": "/nowhere"}}
    return SFTConfig(**{**settings, **changes})


def test_equal_configurations_have_equal_digests_and_others_have_others(tmp_path):
    assert digest(config_of(tmp_path)) == digest(config_of(tmp_path))
    assert digest(config_of(tmp_path)) != digest(config_of(tmp_path, run={"dir": "/shared/runs/a b", "seed": 1}))


def test_a_job_is_named_after_its_run_and_its_own(tmp_path):
    first, second = new_job_id(config_of(tmp_path)), new_job_id(config_of(tmp_path))
    assert first.startswith("a-b-") and first != second


def test_what_is_kept_with_a_job(tmp_path):
    about = about_run("sft", config_of(tmp_path), tmp_path, ["sft.yaml", "--run.steps=3"])
    assert about["run"] == "a b" and about["stage"] == "sft" and about["commit"] == ""
    assert json.loads(about["arguments"]) == ["sft.yaml", "--run.steps=3"] and about["stop_wait_s"] == "1800"


def test_the_commit_says_whether_files_differ_from_it(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True,
                       capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "begin")
    clean = git_commit(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean) == 40 and git_commit(tmp_path) == clean + "+"


def test_the_part_of_the_environment_that_is_configuration_goes_along(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_RUN__STEPS", "7")
    monkeypatch.setenv("RLHF_RAY_STARTED_BY_AUTO_RESUME", "1")
    monkeypatch.setenv("SECRET", "s")
    assert variables_of(config_of(tmp_path), {"ASKED": "x"}) == {
        "RLHF_RAY_RUN__STEPS": "7", "ASKED": "x", "RAY_JOB_STOP_WAIT_TIME_S": "1800"}


def test_what_cannot_be_seen_from_here_is_named_and_left_to_the_job(tmp_path):
    (said,) = check_before_submission("sft", config_of(tmp_path))
    assert "/nowhere" in said and "d.jsonl" in said and "/shared/runs" not in said


def test_a_password_does_not_go_to_the_cluster(tmp_path):
    config = config_of(tmp_path, run={"dir": "/shared/runs/a", "upload": "s3://key:hidden@bucket/run"})
    with pytest.raises(ConfigError, match="run.upload contains a password") as caught:
        check_before_submission("sft", config)
    assert "hidden" not in str(caught.value)


def test_gpus_of_an_unknown_kind_are_no_reason_to_refuse(tmp_path):
    config = config_of(tmp_path, pools={"default": {"gpus": 1}}, learner={"gpus": 1})
    (said,) = check_plan(config, [Node("n", {"CPU": 8, "GPU": 1}, 64 * 2**30)], "there")
    assert "no plan was made" in said and "unknown kind" in said


@pytest.mark.parametrize(("row", "refused"), [
    ('{"text": "w2 w3"}', None), ("no JSON", r"d\.jsonl, line 1"),
    ('{"prompt": "w2"}', r"d\.jsonl, line 1: no columns of demonstrations are found")])
def test_rows_that_are_seen_are_checked_as_before_a_run(tmp_path, row, refused):
    (tmp_path / "d.jsonl").write_text(row + "\n")
    config = config_of(tmp_path, data={"path": str(tmp_path / "d.jsonl"), "max_tokens": 64},
                       model={"path": str(make_tiny_llama(tmp_path / "model"))})
    if refused is None:
        assert check_before_submission("sft", config) == []
    else:
        with pytest.raises(DataError, match=refused):
            check_before_submission("sft", config)


def test_a_model_that_is_seen_is_checked_as_before_a_run(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "w2", "response": "w3"}\n')
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"model\.path='.*/model' has no config\.json"):
        check_before_submission("sft", config_of(tmp_path, model={"path": str(tmp_path / "model")}))


def test_models_of_no_known_shape_are_not_planned(tmp_path):
    (said,) = check_plan(config_of(tmp_path), [], "there")
    assert said.startswith("no plan was made for the cluster")
