"""What `rlhf-ray status` says, from files made by hand."""

import json
import subprocess
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from rich.console import Console

from rlhf_ray.errors import DataError
from rlhf_ray.observability.owner_record import ProcessIdentity, Record
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.sample_files import SampleWriter
from rlhf_ray.observability.status_page import TEXT_LINES, is_finished, status_page

LIVE = {
    "time": 0.0, "step": 2, "steps": 10, "samples": 32, "max_staleness": 0,
    "buffer": {"ready": 8, "under_way": 4, "training": 16, "mb": 1.5},
    "under_way": [{"worker": "generator/1", "phase": "generate", "calls": 3, "seconds": 4.25},
                  {"worker": "policy_learner/0", "phase": "policy_update", "calls": 1, "seconds": 0.5}],
    "chunks": [{"doing": "generated", "chunks": 2, "samples": 8, "oldest": 11, "version": 1, "seconds": 4.3}],
    "leases": [{"samples": 16, "version": 2, "held_by": ["policy_learner", "critic_learner"]}],
}
ELSEWHERE = ProcessIdentity("here", "another boot", 1, 77, 5)


def row(step, seconds, learning):
    return {"step": step, "time": 1.0, "time/step": seconds, "time/publish": 0.1, "throughput/samples_per_second": 8.0,
            "share/generator/busy": 1 - learning, "share/generator/policy_learner": learning,
            "share/policy_learner/busy": learning, "share/policy_learner/generator": 1 - learning}


@pytest.fixture
def shown(tmp_path):
    def show(live=None, rows=(), owner=ELSEWHERE, workers=False):
        if owner:
            (tmp_path / "owner").mkdir(exist_ok=True)
            (tmp_path / "owner/term_1.json").write_bytes(Record(1, owner, 0.0, 0.0).encoded())
        if live:
            (tmp_path / "status.json").write_text(json.dumps(live))
        if rows:
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        console = Console(width=140, color_system=None)
        with console.capture() as captured:
            console.print(status_page(tmp_path, workers))
        return captured.get()

    return show


def test_a_running_run_says_how_far_it_is_what_waits_and_who_holds_what(shown):
    rows = [row(1, 3.0, 0.2), row(2, 1.0, 0.6)]
    text = shown(LIVE | {"time": time.time(), "reference": "none: so it is"}, rows, workers=True)
    assert "reference: none: so it is" in text and "step 2 of 10, running (process 77 on here since 19" in text
    assert "2 s a step, 8 samples/s, 16 s left" in text
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert lines >= {"generator 70% policy learner 30%", "policy learner 30% generator 70%",
                     "generator/1 generate (3 calls) 4.2 s", "policy_learner/0 policy update 0.5 s",
                     "chunks 2 of 8 samples being generated, the oldest is 11, admitted at version 1 4.3 s",
                     "lease 16 samples for the update of version 2, held by policy learner, critic learner",
                     "buffer 8 samples ready, 4 being made, 16 in training 1.5 MiB",
                     "bottleneck: generator, busy for 70% of the time"}
    assert "what to change: generators and learners take turns (70% and 30% of the time)" in text


def test_a_silent_run_is_told_from_one_that_ended(shown):
    text = " ".join(shown(LIVE | {"time": time.time() - 120}).split())  # a long path wraps the line
    assert "no news for 2 min 00 s: process 77 on here hangs or is gone" in text
    text = shown(LIVE | {"time": 5.0, "ended": "stopped by SIGTERM"})
    assert "step 2 of 10, stopped by SIGTERM" in text and "under way" not in text


def test_a_run_is_finished_when_its_summary_is_there(shown, tmp_path):
    made = LIVE | {"step": 10, "ended": "finished"}
    assert "step 10 of 10; writing its summary" in shown(made | {"time": time.time()})
    assert "step 10 of 10; killed before its summary (--resume writes it)" in shown(made)
    (tmp_path / "summary.json").write_text(json.dumps({"stage": "ppo", "steps": 10}))
    assert "step 10 of 10, finished" in shown(made)


def test_a_run_that_was_killed_on_this_machine_is_told_at_once(shown):
    live, here = LIVE | {"time": time.time()}, ProcessIdentity.own()
    child = subprocess.Popen(["true"])
    child.wait()
    gone = replace(here, pid=child.pid)
    assert f"step 4; {gone} is gone (--resume" in shown(rows=[{"step": 4, "time": 1.0}], owner=gone)
    text = shown(live, [{"step": 7, "time": 1.0}], owner=gone)
    assert f"step 7 of 10; {gone} is gone (--resume" in text and "under way" not in text
    assert f"running ({here} since" in shown(live, owner=here, workers=True)


def test_a_run_of_another_stage_has_its_step_and_pace(shown):
    text = shown(rows=[{"step": 4, "time": 1.0, "time/step": 0.5, "sft/loss": 2.0}], workers=True)
    assert "step 4; owned by process 77 on here since" in text and "0.5 s a step" in text
    assert "what to change" not in text


def test_a_finished_run_of_another_stage_says_so(shown, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"stage": "sft", "steps": 4, "rows": 9, "seconds": 3.0}))
    assert "step 4 of 4, finished" in shown(rows=[{"step": 4, "time": 1.0, "time/step": 0.5, "sft/loss": 2.0}])


def test_a_finished_stage_without_steps_says_what_it_made(shown, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(
        {"stage": "preferences", "pairs": 5177, "left_out": 823, "seconds": 103.0, "output": "p.jsonl"}))
    said = "Finished in 1 min 43 s: pairs 5177, left out 823."
    assert said in shown()
    (tmp_path / "config.yaml").write_text("model: {path: m}\n")
    assert said in write_report(tmp_path).read_text() and "No step" not in (tmp_path / "report.html").read_text()


def test_a_run_that_starts_its_workers_says_who_does(shown):
    assert "no step yet; owned by process 77 on here since" in shown(workers=True)
    assert "no step yet; under way since 1970" in shown() and "no step is finished yet" in shown()


def test_a_directory_without_a_run_is_refused(shown, tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").touch()
    with pytest.raises(DataError, match=rf"holds no started run.*, such as {tmp_path}/sft$"):
        shown(owner=None)
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(DataError, match="status.json cannot be read"):
        status_page(tmp_path)


def test_steps_in_which_a_worker_was_missing_do_not_speak_of_other_settings(shown):
    idle = row(2, 60.0, 0.5) | {f"share/{role}/{who}": share for role in ("generator", "policy_learner") for who, share
                                in (("busy", 0.05), ("generator", 0.0), ("policy_learner", 0.0), ("coordinator", 0.95))}
    live = LIVE | {"time": time.time(), "quarantined": 1}
    assert "no role works" in shown(live, [row(1, 3.0, 0.5), idle])
    text = shown(live, [row(1, 3.0, 0.5), idle | {"faults/lost_workers": 1.0}])
    assert "no role works" not in text and "take turns (50% and 50%" in text
    assert "1 sample left out" in text


def learning(step, **numbers):
    return {**row(step, 1.0, 0.5), "reward/mean": numbers.pop("reward"), "kl/sequence": numbers.pop("kl"),
            "response/length": numbers.pop("length"), **{f"eval/{name}": value for name, value in numbers.items()}}


class TestLearning:
    """What a person looks for first: does it learn?"""

    ROWS = [{"step": 0, "time": 1.0, "eval/reward": 0.25}, learning(1, reward=0.125, kl=0.0, length=31.0),
            learning(2, reward=0.5, kl=1.5, length=30.0, reward_unknown=3.0),
            {"step": 2, "time": 1.0, "eval/reward": 0.75}, learning(3, reward=0.875, kl=4.5, length=44.0)]

    def lines(self, text):
        return [" ".join(line.split()) for line in text.splitlines()]

    def test_reward_kl_length_and_the_last_evaluation_come_first_now_and_at_the_start(self, shown):
        lines = self.lines(shown(LIVE | {"time": time.time()}, self.ROWS))
        begin = lines.index("start step now step")
        assert lines[begin + 1 : begin + 5] == [
            "reward 0.125 1 0.875 3", "KL from the reference 0 1 4.5 3", "response length 31 1 44 3",
            "held-out reward 0.25 0 0.75 2"]
        assert begin < next(i for i, line in enumerate(lines) if line.startswith("role busy"))

    def test_a_metric_with_one_value_has_no_start(self, shown):
        assert "held-out reward 0.25 0" in self.lines(shown(rows=self.ROWS[:2]))

    def test_a_value_that_is_not_finite_is_left_out(self, shown):
        rows = [*self.ROWS, learning(4, reward=None, kl=9.0, length=50.0)]
        assert {"reward 0.125 1 0.875 3", "KL from the reference 0 1 9 4"} <= set(self.lines(shown(rows=rows)))

    def test_the_start_of_a_long_run_is_its_start(self, shown):
        rows = [learning(step, reward=float(step), kl=0.0, length=9.0) for step in range(1, 600)]
        assert "reward 1 1 599 599" in self.lines(shown(rows=rows))

    def test_a_text_of_the_newest_step_is_shown_without_control_characters(self, shown, tmp_path):
        writer = SampleWriter(tmp_path / "samples")
        for step, response in ((1, "old"), (2, "new\x1b[31m line\n" * 9)):
            rows = [{"step": step, "epoch": 0, "row": row, "sample": 0, "prompt": "2 + 2 = [bold]", "messages": None,
                     "response": response, "score": 0.5, "finish_reason": "stop"} for row in range(2)]
            writer.write(step, pa.Table.from_pylist(rows))
        text = shown(rows=self.ROWS)
        lines = self.lines(text)
        begin = lines.index("a sample of step 2, score 0.5:")
        assert lines[begin + 1 : begin + 3] == ["prompt 2 + 2 = [bold]", "response new\\x1b[31m line"]
        assert "\x1b" not in text and text.count("new\\x1b[31m line") == TEXT_LINES and "..." in text

    def test_processes_and_leases_are_behind_workers(self, shown):
        live = LIVE | {"time": time.time(), "checkpoint": {"step": 2, "seconds": 65.0, "doing": "hash x"}, "down": [
            {"worker": "generator/0", "lost": "killed", "seconds": 3.0}]}
        text = shown(live, self.ROWS)
        assert not {"lease", "buffer", "chunks"} & {line.split()[0] for line in text.splitlines() if line.strip()}
        assert "process 77" not in text
        assert "generator/0 is down: killed; it is being replaced, for 3.0 s" in text
        assert "checkpoint of step 2 under way for 1 min 05 s (hash x)" in text
        assert {"lease", "buffer", "chunks"} <= {line.split()[0] for line in shown(live, workers=True).splitlines()
                                                if line.strip()}

    def test_the_method_is_named(self, shown, tmp_path):
        (tmp_path / "config.yaml").write_text("algorithm: {estimator: grpo}\nrewards: {r: {type: function}}\n")
        assert f"{tmp_path.name}: GRPO, step 2 of 10, running" in shown(LIVE | {"time": time.time()}, self.ROWS)


class TestSeveralRuns:
    @pytest.fixture
    def runs(self, tmp_path):
        """Three runs below a directory: a PPO run under way, a finished SFT run one level deeper, and a damaged one."""
        def write(name, config, rows=(), **files):
            directory = tmp_path / name
            directory.mkdir(parents=True)
            (directory / "config.yaml").write_text(config)
            (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            for file, value in files.items():
                (directory / f"{file}.json").write_text(value if isinstance(value, str) else json.dumps(value))

        rloo = "algorithm: {estimator: rloo}\nrewards: {r: {type: number}}\n"
        write("a", rloo, TestLearning.ROWS, status=LIVE | {"time": time.time(), "step": 3})
        write("mine/sft", "data: {path: d}\n", [{"step": 4, "time": 1.0, "sft/loss": 2.0}],
              summary={"stage": "sft", "steps": 4})
        write("z", rloo, status="{")
        (tmp_path / "empty").mkdir()
        return tmp_path

    def page(self, directory):
        console = Console(width=400, color_system=None)
        with console.capture() as captured:
            console.print(status_page(directory))
        return [" ".join(line.split()) for line in captured.get().splitlines()]

    def test_a_directory_of_runs_is_a_table_of_them(self, runs):
        head, first, second, damaged = self.page(runs)
        assert head == "run trains by step state reward or loss held out KL last row"
        assert first.startswith("a RLOO 3 of 10 running 0.125 → 0.875 0.25 → 0.75 0 → 4.5 ")
        assert second.startswith("mine/sft Supervised fine-tuning 4 of 4 finished 2 ") and second.endswith(" ago")
        assert damaged.startswith(f"z {runs}/z/status.json cannot be read")

    def test_it_is_finished_when_all_are(self, runs):
        assert not is_finished(runs)

    def test_a_run_with_runs_in_it_is_the_run(self, runs):
        (runs / "metrics.jsonl").write_text(json.dumps(TestLearning.ROWS[1]) + "\n")
        assert self.page(runs)[0].startswith(f"{runs}: step 1")
