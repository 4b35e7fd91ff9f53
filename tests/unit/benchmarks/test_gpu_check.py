"""The GPU check loses no row to an error, saves what it prints, needs no more than it says, and notices mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import seams
from benchmarks.gpu_check.pair_settings import ON_CPU, ON_GPU, PairSetting
from benchmarks.gpu_check.parts import PARTS, PLANS, Check, Part, chosen
from benchmarks.gpu_check.results import Results, describe_machine
from benchmarks.gpu_check.rows import Row, failed, judged
from benchmarks.gpu_check.runner import Place, rows_of
from rlhf_ray.config.learner import LoRAConfig
from tests.blocked_packages import without

ROOT = Path(__file__).parents[3]
CHECKS = [check for part in PARTS.values() for check in part.checks]
SETTINGS = [PairSetting(ON_GPU, "ipc", sleep_level=2), PairSetting(ON_GPU, zero_stage=3, sleep_level=1),
            PairSetting(ON_GPU, lora=LoRAConfig()), PairSetting(ON_GPU, "nccl", apart=True), PairSetting(ON_CPU),
            PairSetting(ON_CPU, "nccl", zero_stage=3)]
"""Those of the engine and the cluster."""


def sample(name):
    return Check("sample_checks", name, "a mistake", 1.0, package="tests.unit.benchmarks")


def launched(environment, *words, seconds=240):
    return subprocess.run([ROOT / "launch" / "gpu_check", *words], env={**environment, "PYTHON": sys.executable},
                          capture_output=True, text=True, timeout=seconds)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    answer = launched({**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)})
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1 and "--cpu" in answer.stderr


def test_a_part_whose_packages_are_missing_is_refused_when_it_is_named(tmp_path):
    answer = launched(without(tmp_path / "site", "ray", "pydantic"), "--cpu", "--part", "cluster", "--part", "learner")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "--part learner needs pydantic; --part cluster needs pydantic, ray" in answer.stderr
    assert "launch/gpu_wheels" in answer.stderr


def test_the_seams_need_none_of_the_engines_and_no_wheels(tmp_path):
    environment = without(tmp_path / "site", "ray", "vllm", "deepspeed", "pydantic", "hjson", "transformers", "psutil",
                          "peft")
    answer = launched(environment, "--cpu", "--out", str(tmp_path / "out"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "not run: learner, which needs deepspeed, pydantic" in answer.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()][1:]
    assert {row["check"] for row in rows} == {"attention", "logprobs", "fingerprints", "ipc"}
    assert {row["verdict"] for row in rows} == {"ok", "figure", "not run"}


@pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: part.name)
def test_importing_a_part_takes_no_other_packages_than_it_names(part, tmp_path):
    others = {"ray", "vllm", "deepspeed", "pydantic"} - set(part.packages)
    later = ", rlhf_ray.weights.direct_transport" if part.name == "seams" else ""  # imported on a GPU only
    code = f"import sys, benchmarks.gpu_check.{part.name}{later}; print('rlhf_ray' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], env=without(tmp_path / "site", *others), text=True,
                            capture_output=True, timeout=120)
    assert answer.stdout == "True\n", answer.stderr[-2000:]


def test_every_check_is_where_the_table_says():
    for check in CHECKS:
        assert re.search(rf"^(async )?def {check.name}\(place: Place\)",
                         (ROOT / "benchmarks" / "gpu_check" / f"{check.part}.py").read_text(), re.M), check


def test_without_a_choice_every_part_runs_whose_packages_are_here(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.parts.find_spec", lambda name: name not in ("ray", "vllm") or None)
    assert [part.name for part in chosen([])] == ["seams", "learner", "updates"]
    assert [part.name for part in chosen(["cluster", "seams"])] == ["seams", "cluster"]
    some = chosen(["learner:resume", "seams", "learner:update", "seams:ipc"])
    assert [(part.name, len(part.checks)) for part in some] == [("seams", 4), ("learner", 1), ("learner", 1)]
    assert [part.checks[0].name for part in some[1:]] == ["update", "resume"]


def test_an_error_costs_none_of_the_rows_before_it(tmp_path):
    rows = list(rows_of(sample("fails"), (), tmp_path / "log.txt", 100.0))
    assert rows[0] == Row("a figure", "1")
    assert (rows[1].verdict, rows[1].found, rows[1].is_bad) == ("FAILED", "ValueError: no such kernel", True)
    assert "said before the error" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(("name", "said"), [("killed", "signal 9"), ("hangs", "not done within")])
def test_a_process_that_is_killed_or_hangs_costs_its_own_rows_only(name, said, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.runner.LEAST_S", 2.0)
    rows = list(rows_of(sample(name), (), tmp_path / "log.txt", 100.0))
    assert [row.what for row in rows] == ["a figure", name]
    assert rows[1].verdict == "FAILED" and said in rows[1].found


def test_of_several_measurements_an_error_or_the_end_of_the_process_costs_one(tmp_path):
    rows = list(rows_of(sample("several"), (), tmp_path / "log.txt", 100.0))
    assert [row.what for row in rows] == [
        "first begins", "first ends", "failing begins", "failing", "third begins", "third ends", "killed begins",
        "killed", "long", "last begins", "last ends"]
    assert [row.found for row in rows if row.is_bad] == ["ValueError: out of memory", "its process ended with signal 9"]
    assert rows[1].found == rows[5].found != rows[-1].found, "one process until it ends"
    assert rows[8].verdict == "not run" and "expected to take 900 s" in rows[8].note


def test_of_several_measurements_those_named_are_made(tmp_path):
    rows = list(rows_of(sample("several"), (), tmp_path / "log.txt", 100.0, ("third", "las")))
    assert [row.what for row in rows] == ["third begins", "third ends", "last begins", "last ends"]


def test_a_process_that_cannot_be_cleaned_leaves_the_rest_to_another(tmp_path):
    rows = list(rows_of(sample("uncleaned"), (), tmp_path / "log.txt", 100.0))
    assert [row.what for row in rows] == ["first begins", "first ends", "second begins", "second ends"]
    assert rows[1].found != rows[3].found and not any(row.is_bad for row in rows)


def test_measurements_behind_one_that_uses_up_the_time_are_listed(tmp_path):
    rows = list(rows_of(sample("stuck"), (), tmp_path / "log.txt", 8.0))
    assert [(row.what, row.verdict) for row in rows] == [
        ("first begins", "figure"), ("first", "not run"), ("second", "not run")]


def test_on_a_gpu_a_measurement_that_hangs_costs_those_behind_it_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.runner.HANGING_S", 1.0)
    monkeypatch.setattr("benchmarks.gpu_check.runner.BEGINNING_S", 1.0)
    rows = list(rows_of(sample("stuck"), ("GPU",), tmp_path / "log.txt", 60.0))
    assert [row.what for row in rows] == ["first begins", "first", "second begins", "second"]
    assert "not done within 1 s" in rows[1].found


def test_a_plan_consists_of_checks_that_there_are_and_takes_no_parts(capsys, monkeypatch):
    known = {f"{check.part}:{check.name}": check for check in CHECKS}
    for plan in PLANS.values():
        assert [f"{part.name}:{part.checks[0].name}" for part in plan.parts] == list(plan.checks)
        assert known.keys() >= set(plan.checks)
        needed = [known[name].least_s or known[name].seconds for name in plan.checks]
        assert sum(needed[:2]) <= plan.seconds, "at least two checks, and the others if these are fast"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--plan", "updates", "--part", "seams"])
    with pytest.raises(SystemExit):
        command.arguments()
    assert "leave out --part" in capsys.readouterr().err


def test_when_it_is_ended_the_rows_so_far_are_printed(tmp_path, capsys):
    results = Results(tmp_path, {"device": "none"})
    results.add(CHECKS[0], judged("speed", "7 s", True, "at most 8"), 1.0)
    with pytest.raises(SystemExit):
        command.ended(results, signal.SIGTERM)
    assert "ok      speed: 7 s\nended by SIGTERM\n" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "ignored"), [("SIGINT", ""), ("SIGHUP", ""), ("SIGTERM", "trap '' HUP; ")])
def test_ctrl_c_and_a_closed_terminal_end_it_as_sigterm_does(tmp_path, number, ignored):
    words = f"{ignored}exec {ROOT}/launch/gpu_check --cpu --part seams --out {tmp_path}"
    process = subprocess.Popen(["bash", "-c", words], env={**os.environ, "PYTHON": sys.executable}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in process.stdout:
        if "which catches" in line:
            break
    if ignored:
        process.send_signal(signal.SIGHUP)
    process.send_signal(signal.Signals[number])
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and rest.endswith(f"ended by {number}\n"), rest


@pytest.mark.parametrize("seconds", ["0", "-5", "nan"])
def test_no_seconds_are_refused(capsys, monkeypatch, seconds):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--cpu", "--seconds", seconds])
    with pytest.raises(SystemExit):
        command.arguments()
    assert f"--seconds {seconds} leaves no time" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--cpu", "--part", "seams", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match=r"file: rows cannot be saved there .* name another folder"):
        command.main()


def test_the_commit_can_be_named_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("GPU_CHECK_COMMIT", "0123456789abcdef0")
    assert describe_machine([])["commit"] == "0123456789ab"


def test_every_update_of_the_plan_has_settings_that_a_policy_could_have():
    from benchmarks.gpu_check.random_policy import Setting
    from benchmarks.gpu_check.updates import variants

    for variant in variants(gpu=True):
        config = Setting(variant.size, variant.fields).config(gpu=True)
        assert config.micro_batch_tokens >= variant.size.length and config.autocast == "bfloat16"
    assert len({variant.name for variant in variants(gpu=True)}) == len(variants(gpu=True))


def test_the_run_of_the_plan_is_one_whose_roles_share_a_gpu(tmp_path):
    from benchmarks.gpu_check.cluster import configuration
    from rlhf_ray.config.derived import transport_of
    from rlhf_ray.config.stages import PPOConfig

    config = PPOConfig.model_validate(configuration(tmp_path, ON_GPU, str(tmp_path)))
    roles = (config.generator, config.policy, config.critic, config.reference)
    assert sum(role.gpus for role in roles) == pytest.approx(1) and transport_of(config) == "ipc"
    assert config.generator.sleep_level == 2 and config.policy.offload_between_phases


def test_phases_have_the_operations_of_their_passes():
    from benchmarks.gpu_check.cluster import EPOCHS, _phases
    from rlhf_ray.planning.hardware import H100
    from rlhf_ray.planning.model_shape import ModelShape

    shape = ModelShape(2048, 16, 32, 8, 8192, 128_256)
    step = {"time/step": 10.0, "throughput/samples_per_second": 1.0, "throughput/tokens_per_second": 100.0,
            "time/logprobs": 1.0, "time/policy_update": 3.0, "time/generate": 4.0}
    rows = {row.what: row for row in _phases([{**step, "time/step": 99.0}, step], shape, H100)}
    assert rows["a step"].found == "10.00 s, 1.0 samples/s, 100 tokens/s"
    share = 10 * shape.row_flops(100) / H100.flops
    assert rows["a step: logprobs"].note == f"1,000 tokens/s, {share:.1%} of the peak"
    assert rows["a step: policy_update"].note == f"333 tokens/s, {EPOCHS * share:.1%} of the peak"
    assert rows["a step: generate"].found == "4.00 s, 40%" and rows["a step: the rest"].found == "2.00 s"


def test_a_check_for_which_no_time_is_left_is_listed_as_not_run(tmp_path):
    (row,) = rows_of(sample("fails"), (), tmp_path / "log.txt", 0.5)
    assert row.verdict == "not run" and "--seconds" in row.note


def test_all_rows_are_printed_and_saved_and_one_mistake_counts(tmp_path, capsys):
    part = Part("sample_checks", "", (), (sample("fails"), sample("finds_a_mistake")))
    results = Results(tmp_path, {"device": "none"})
    assert command.run([part], (), results, 100.0) is False
    shown = capsys.readouterr().out
    saved = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert saved[0]["machine"] == {"device": "none"}
    assert [(row["check"], row["verdict"]) for row in saved[1:]] == [
        ("fails", "figure"), ("fails", "FAILED"), ("finds_a_mistake", "WRONG")]
    assert re.search(r"WRONG +\d+\.\d s  on the CPU: True \(at most 1\)", shown)
    assert "finds_a_mistake, which catches a mistake" in shown
    assert command.run([part.__class__("x", "", (), ())], (), results, 100.0) is True


def test_the_table_has_the_last_run_of_each_check(tmp_path, monkeypatch):
    first, second = CHECKS[0], CHECKS[4]
    results = Results(tmp_path, {"device": "GPU 1", "torch": "2.0"})
    results.add(first, failed("old", "broken"), 1.0)
    results.add(second, Row("kept | and escaped", "5"), 1.0)
    monkeypatch.setattr("benchmarks.gpu_check.results.datetime", Later)
    results = Results(tmp_path, {"device": "GPU 1", "torch": "2.1"})
    results.add(first, judged("new", "7", False, "at most 6"), 2.04)
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("# GPU 1, 2099-01-02\n\ntorch 2.1\n") and "old" not in text
    assert f"Catches {first.catches}." in text and "| new | 7 | WRONG | 2.0 | at most 6 |" in text
    assert "| kept / and escaped | 5 | figure | 1.0 |  |" in text


class Later:
    @staticmethod
    def now(zone):
        from datetime import datetime

        return datetime(2099, 1, 2, tzinfo=zone)


def wrong(rows):
    return [row.what for row in rows if row.verdict == "WRONG"]


def test_another_window_is_noticed(tmp_path, monkeypatch):
    right = seams._row_by_row
    monkeypatch.setattr(seams, "_row_by_row", lambda *a, window_size, **more: right(
        *a, window_size=(window_size[0] + 1, 0) if window_size[0] > 0 else window_size, **more))
    assert wrong(seams.attention(Place((), tmp_path))) == ["variable-length attention, grouped heads, a window"]


def test_other_log_probabilities_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(seams, "VOCABULARY", 500)
    assert wrong(seams.logprobs(Place((), tmp_path))) == []
    monkeypatch.setattr(seams, "token_logprobs", partial(seams.token_logprobs, temperature=1.001))
    assert wrong(seams.logprobs(Place((), tmp_path))) == ["log-probabilities over 500 logits"]


def test_a_digest_that_misses_a_change_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(seams, "fingerprint", lambda entry, tensor: f"{entry.dtype} {tuple(tensor.shape)}")
    assert len(wrong(seams.fingerprints(Place((), tmp_path)))) == 4


def test_a_learner_in_the_wrong_precision_is_noticed(tmp_path, monkeypatch):
    """In a process of its own, which joins a process group."""
    code = f"""if True:
        import os
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        from pathlib import Path
        from benchmarks.gpu_check import learner
        from benchmarks.gpu_check.runner import Place
        place = Place((), Path({str(tmp_path)!r}))
        learner.HALF = {{"autocast": "float32"}}
        print(*[f"{{row.what}}: {{row.verdict}}" for row in learner.adapters(place)], sep="\\n")
    """
    answer = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                            capture_output=True, timeout=240)
    assert "precision of the logits: WRONG" in answer.stdout, answer.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_is_rehearsed_on_the_cpu(plan, tmp_path):
    answer = launched(dict(os.environ), "--cpu", "--plan", plan, "--out", str(tmp_path), seconds=1800)
    assert answer.returncode == 0, answer.stdout + (tmp_path / "log.txt").read_text()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()][1:]
    assert {f"{row['part']}:{row['check']}" for row in rows} == set(PLANS[plan].checks)
    assert len(rows) > 5 and sum(row["verdict"] == "not run" for row in rows) < len(rows) / 2
    assert answer.stdout.count(f"{rows[0]['what']}: {rows[0]['found']}") == 2, "as it is measured, and at the end"


def test_differences_are_relative_to_all_that_is_expected():
    from benchmarks.gpu_check.learner import apart, digest

    expected = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    found = {**expected, "b": torch.tensor([[4.5]])}
    assert apart(found, expected) == pytest.approx(0.1) and apart(expected, expected) == 0
    assert digest(found) != digest(expected) == digest(dict(reversed(expected.items())))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.transport}, {s.scale.dtype}, {s.zero_stage}")
def test_its_sections_are_such_as_a_run_could_have(setting):
    """Fields, bounds and placements are the configuration's own."""
    from rlhf_ray.config.adapter_publication import publishes_adapters
    from rlhf_ray.config.combination_checks import check_transport
    from rlhf_ray.config.generation import WeightsConfig
    from rlhf_ray.config.stages import PPOConfig

    generation, policy, scale = setting.generation, setting.policy, setting.scale
    config = PPOConfig.model_construct(
        weights=WeightsConfig(transport=setting.transport), generator=generation, policy=policy,
        pools={"default": setting.pool})
    if scale.gpu:
        check_transport(config)
    assert policy.micro_batch_tokens >= scale.context <= scale.architecture.max_positions
    assert publishes_adapters(config, scale.architecture.family) == (setting.lora is not None)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.transport}, {s.scale.dtype}, {s.zero_stage}")
def test_what_it_measures_memory_against_is_the_plan_of_such_a_run(setting, tmp_path):
    from benchmarks.gpu_check.measures import planned
    from rlhf_ray.config.model import ModelConfig
    from rlhf_ray.planning.hardware import gpu_of
    from tests.models import make_tiny_llama

    model = ModelConfig(path=str(make_tiny_llama(tmp_path / "m")))
    found = planned(setting, model, gpu_of("NVIDIA H100 80GB HBM3") if setting.scale.gpu else None)
    assert found.keys() == {"generator", "policy_learner"} and min(found.values()) > 2**20


def test_the_help_and_the_page_say_what_each_check_catches():
    answer = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", "--help"], cwd=ROOT, capture_output=True,
                            text=True, timeout=60)
    page = " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    for check in CHECKS:
        assert check.catches in answer.stdout, check.name
        assert f"| `{check.part}` | `{check.name}` | {check.catches} |" in page, check.name
    assert "Exit codes: 0" in answer.stdout
