"""Runs on many GPUs, on paper: every shape has an answer, and answers respond to GPUs and batches as they should."""

from dataclasses import replace

import pytest

from benchmarks.cluster_model.prediction import Predicted, Refused, predict
from benchmarks.cluster_model.published import Beside, published
from benchmarks.cluster_model.report import HEADS, PUBLISHED_HEADS, UNMEASURED, published_table, sweep_table
from benchmarks.cluster_model.run_shape import MODELS, RunShape, divisions

SMALL = RunShape(MODELS["8B"], 16)


def predicted(**changes) -> Predicted:
    made = predict(replace(SMALL, **changes))
    assert isinstance(made, Predicted)
    return made


class TestPredictions:
    """One run."""

    @pytest.mark.parametrize("model", MODELS)
    def test_every_model_fits_some_gpus_and_is_in_the_table(self, model):
        made = [predict(RunShape(MODELS[model], gpus)) for gpus in (8, 64)]
        assert isinstance(made[1], Predicted)
        rows = sweep_table({model: made}).splitlines()[2:]
        assert [row.count("|") for row in rows] == [len(HEADS) + 1] * 2
        assert isinstance(made[0], Refused) == (model != "8B")

    def test_what_does_not_fit_says_why(self):
        assert "policy does not fit" in predict(RunShape(MODELS["70B"], 16)).reason
        assert "GPUs of its own" in predict(RunShape(MODELS["70B"], 8)).reason

    def test_more_gpus_are_faster_and_no_gpu_gains(self):
        made = [predicted(gpus=gpus) for gpus in (16, 64, 256)]
        seconds = [one.step.seconds for one in made]
        assert seconds == sorted(seconds, reverse=True)
        assert made[0].samples_per_gpu > made[1].samples_per_gpu > made[2].samples_per_gpu

    def test_twice_the_batch_takes_about_twice_the_update(self):
        once, twice = predicted(), predicted(prompts=2 * SMALL.prompts)
        alike = twice.parts["update"] * twice.division.learners / (once.parts["update"] * once.division.learners)
        assert alike == pytest.approx(2, rel=0.1)

    def test_staleness_is_never_slower(self):
        seconds = [predicted(gpus=64, staleness=staleness).step.seconds for staleness in (0, 1, 2, 4)]
        assert seconds == sorted(seconds, reverse=True)

    def test_a_critic_costs(self):
        assert predicted(critic=True).step.seconds > predicted().step.seconds

    def test_a_lower_share_of_the_peak_is_slower(self):
        assert predicted(training_share=0.25).step.seconds > predicted().step.seconds

    def test_the_object_store_sends_a_copy_to_each_node_and_nccl_one(self):
        store = predicted(gpus=256, transport="object_store").parts["publication"]
        assert store > 5 * predicted(gpus=256).parts["publication"]

    def test_divisions_use_no_more_gpus_than_there_are_and_no_rank_without_a_row(self):
        for run in (SMALL, RunShape(MODELS["70B"], 1024), replace(SMALL, critic=True)):
            for of in divisions(run):
                models = 1 + run.critic
                assert of.generators + models * (of.scorers + of.learners) <= run.gpus
                assert of.learners <= 512 and of.scorers % of.shards == 0


class TestPublished:
    """Figures of other systems."""

    def test_rows_name_their_source_and_a_shape_that_is_known(self):
        rows = published()
        assert {row.system.split()[0] for row in rows} == {"NeMo-RL", "verl", "OpenRLHF"}
        for row in rows:
            assert row.url.startswith("https://github.com/") and row.date.startswith("20")
            assert row.run.shape.parameters and row.seconds > 0
            assert (row.run.gpus, row.run.gpu) == (row.gpus, row.gpu)

    def test_published_tokens_a_second_agree_with_their_lengths(self):
        for row in published():
            if row.tokens_per_gpu and row.prompt and row.response:
                tokens = row.prompts * row.samples_per_prompt * (row.prompt + row.response)
                assert row.tokens_per_gpu == pytest.approx(tokens / row.seconds / row.gpus, rel=0.02)

    def test_ours_stand_beside_as_predicted(self):
        row = published()[0]
        ours = predict(row.run)
        text = published_table([Beside(row, ours, ours)])
        assert text.startswith(f"Ours: {UNMEASURED}.")
        assert text.splitlines()[-1].count("|") == len(PUBLISHED_HEADS) + 1
        assert ours.tokens == pytest.approx(2048 * 1149)
