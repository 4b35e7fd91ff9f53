"""The report: nothing from outside, nothing unescaped, only plots that have numbers."""

import json
import math
import re

import plotly.graph_objects as go
import pyarrow as pa
import pytest
from plotly.offline import get_plotlyjs

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import DataError
from rlhf_ray.observability.chart_specs import CHARTS, PHASE_COLOURS
from rlhf_ray.observability.html_page import ASSETS, figures_json
from rlhf_ray.observability.metrics import MetricsWriter, read_metrics
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.report_charts import MAX_BARS, MAX_POINTS, Chart, charts_of, running_mean, series, thin
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SampleWriter

FILE_ONLY = LoggingConfig(tensorboard=False, ray_metrics=False)
EVIL = '</script><script>alert("x")</script><img src=http://evil.example/x>'


def write_rows(run_dir, rows):
    writer = MetricsWriter(run_dir, FILE_ONLY)
    for step, values in enumerate(rows, start=1):
        writer.write(step, values)
    writer.close()


def ppo_row(step):
    values = {name: step / 10 for plan in CHARTS for name in plan.metrics
              if name.split("/")[0] not in ("sft", "eval") or name == "eval/solved"}
    values |= {f"time/{phase}": 1.0 for phase in PHASE_COLOURS} | {"time/step": 5.0}
    return values | {"share/generator/busy": 0.75, "share/generator/policy_learner": 0.25,
                     "share/policy_learner/busy": 1.0}


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "my-run")
    run.config.write_text(f"model:\n  path: '{EVIL}'\n")
    write_rows(run.path, [ppo_row(step) for step in range(1, 101)])
    SampleWriter(run.samples).write(3, pa.Table.from_pylist([
        {"step": 3, "sample": 0, "prompt": EVIL, "response": EVIL, "score": 1.0, "kl": 0.5}]))
    texts = [{"prompt": EVIL, "before": EVIL, "after": "fine & dandy"}]
    run.write_json("evaluation.json", {"before": {"reward": 0.0, EVIL: 1.0}, "after": {"reward": 0.5}, "texts": texts})
    run.write_json("summary.json", {"note": EVIL})
    return run


def own_part(page):
    """The page without plotly's library."""
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def test_the_page_is_self_contained_with_one_copy_of_plotly(run):
    page = own_part(write_report(run.path).read_text())
    assert not re.search(r"<(script|img|iframe|link|source)\b[^>]*\b(src|href)\s*=", page)
    assert not re.search(r"@import|url\(", page)
    assert "default-src 'none'" in page, "the browser is told to refuse anything from outside"


def test_conversations_are_shown_by_their_messages(run):
    """Those of evaluations and of samples; half of a surrogate pair is shown by its escape."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Half \ud83d of it?"}]
    SampleWriter(run.samples).write(4, pa.Table.from_pylist([
        {"step": 4, "sample": 0, "prompt": "flattened", "messages": json.dumps(messages), "response": "\x1b[31mred"}]))
    run.write_json("evaluation.json", {"before": {}, "after": {}, "texts": [
        {"prompt": "flattened", "messages": [*messages[:1], {"role": "user", "content": "Why?"}], "before": "a",
         "after": "b"}]})
    page = own_part(write_report(run.path).read_text())
    assert page.count("<b>system</b>Be kind.</div>") == 2 and "flattened" not in page
    assert "<b>user</b>Why?</div>" in page and "<b>user</b>Half \\ud83d of it?</div>" in page
    assert "\\x1b[31mred" in page


def test_every_text_is_escaped(run):
    page = own_part(write_report(run.path).read_text())
    assert EVIL not in page and "<img" not in page and 'alert("x")' not in page
    assert page.count("&lt;img src=http://evil.example/x&gt;") >= 7
    assert "fine &amp; dandy" in page


def test_figures_cannot_end_their_script_element_and_read_back_as_they_were():
    text = figures_json([Chart("t", "h.", "System", "", [go.Scatter(x=[1], y=[0.5], name=EVIL)],
                               go.Layout(xaxis_title_text=EVIL))])
    assert "<" not in text
    assert json.loads(text) == [{"data": [{"type": "scatter", "x": [1], "y": [0.5], "name": EVIL}],
                                 "layout": {"xaxis": {"title": {"text": EVIL}}}}]


def test_causes_of_episodes_are_zero_in_rows_that_lack_them_and_have_no_line_where_none_occurred(tmp_path):
    whole = {"episodes/turns": 2.0, "episodes/cause/completed": 1.0}
    rows = [{"step": 1, **whole}, {"step": 2, **whole, "episodes/cause/completed": 0.75,
                                   "episodes/cause/error_timeout": 0.25}, {"step": 3, "eval/solved": 0.5}]
    [chart] = [chart for chart in charts_of(rows) if chart.title == "How episodes end"]
    assert {line.name: [*zip(line.x, line.y, strict=True)] for line in chart.data} == {
        "completed": [(1, 1.0), (2, 0.75)], "error timeout": [(1, 0.0), (2, 0.25)]}


def test_all_plots_are_there_with_axis_titles_and_a_sentence(run):
    charts = charts_of(read_metrics(run.path))
    titles = {chart.title for chart in charts}
    assert {plan.title for plan in CHARTS} <= titles
    assert {"Where each step's time went", "What each role did, and whom it waited for"} <= titles
    for chart in charts:
        assert chart.layout["xaxis"]["title"]["text"] and chart.layout["yaxis"]["title"]["text"], chart.title
        assert chart.healthy.endswith("."), chart.title
        assert chart.data and all(any(math.isfinite(y) for y in trace["y"]) for trace in chart.data), chart.title


def test_colours_of_figures_are_those_of_the_light_and_the_dark_palette(run):
    named = set(re.findall(r"var\(--(\w+)(?:/\d+)?\)", figures_json(charts_of(read_metrics(run.path)))))
    light, dark = (ASSETS / "report.css").read_text().split("@media (prefers-color-scheme: dark)")
    assert {"policy", "ink"} < named
    assert all(f"--{name}: #" in palette for name in named for palette in (light, dark))


def test_each_plot_has_a_place_on_the_page(run):
    page = write_report(run.path).read_text()
    places = re.findall(r'<div class="plot" id="plot-(\d+)"', page)
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S).group(1))
    assert places == [str(i) for i in range(len(figures))]
    assert len(places) == len(charts_of(read_metrics(run.path)))


def test_missing_metrics_leave_their_plots_out(tmp_path):
    write_rows(tmp_path, [{"reward/mean": value, "reward/gold": math.nan} for value in (0.5, 0.75)])
    assert [chart.title for chart in charts_of(read_metrics(tmp_path))] == ["Reward"]


def test_a_reward_of_several_components_has_a_chart_of_them_and_one_of_failures_if_there_are_any(tmp_path):
    def row(failing, **components):
        return {"reward/mean": 1.0, **{f"reward/component/{n}": v for n, v in components.items()},
                **{f"reward/failures/{n}": failing for n in components}}

    def charts(name, *rows):
        write_rows(tmp_path / name, rows)
        return charts_of(read_metrics(tmp_path / name))

    assert [c.title for c in charts("one", row(0.0, a=1.0), row(0.0, a=2.0))] == ["Reward"]
    both = charts("two", row(0.0, a=1.0, b=5.0), row(0.5, a=2.0, b=6.0))
    assert [c.title for c in both] == ["Reward", "Components of the reward", "Not judged in the ordinary way"]
    assert [(line["name"], line["y"]) for line in both[1].data] == [("a", (1.0, 2.0)), ("b", (5.0, 6.0))]
    assert [line["y"] for line in both[2].data] == [(0.0, 0.5)] * 2
    quiet = charts("quiet", row(0.0, a=1.0, b=5.0), row(0.0, a=2.0, b=6.0))
    assert [c.title for c in quiet] == ["Reward", "Components of the reward"]


@pytest.mark.parametrize(
    "room, values, kind, plots",
    [
        ("sft", {"sft/loss": 2.0, "eval/loss": 2.5}, "Supervised fine-tuning", ["Loss"]),
        ("rm", {"reward_model/loss": 0.5, "reward_model/accuracy": 0.75}, "Reward model", ["Loss", "Accuracy"]),
        ("prm", {"process_reward/loss": 0.5, "process_reward/accuracy": 0.75}, "Process reward model",
         ["Loss", "Accuracy"]),
        ("ppo", {"reward/mean": 0.5, "policy/entropy": 2.0}, "PPO from human feedback", ["Reward", "Entropy"]),
    ],
)
def test_every_kind_of_run_has_its_report(tmp_path, room, values, kind, plots):
    write_rows(tmp_path / room, [values, values])
    page = write_report(tmp_path / room).read_text()
    assert f'<div class="eyebrow">{kind}</div>' in page
    assert re.findall(r"<h3>(.*?)</h3>", page) == plots


@pytest.mark.parametrize(("estimator", "reward", "kind"), [
    ("grpo", "function", "GRPO"), ("rloo", "model", "RLOO from human feedback"), ("gae", "number", "PPO")])
def test_a_report_says_how_the_policy_was_trained(estimator, reward, kind, run):
    write_rows(run.path, [{"reward/mean": 0.5, "policy/entropy": 2.0}])
    run.config.write_text(f"algorithm: {{estimator: {estimator}}}\nrewards: {{r: {{type: {reward}}}}}\n")
    assert f'<div class="eyebrow">{kind}</div>' in write_report(run.path).read_text()


def test_the_verdict_is_coloured_by_which_way_is_better(run):
    run.write_json("evaluation.json", {"before": {"gold": 0.25, "eval/loss": 1.0, "kl": 0.0},
                                       "after": {"gold": 0.5, "eval/loss": 2.0, "kl": 4.0}})
    page = write_report(run.path).read_text()
    pills = re.findall(r'<span class="pill (\w+)">', page)
    assert pills == ["better", "worse", "same"]
    assert "▲ +0.25 better</span>" in page, "a score's zero is arbitrary, and so is its percentage"
    assert '▲ +1<span class="share"> (+100%)</span>' in page


def test_an_evaluation_with_missing_numbers_shows_a_dash(run):
    run.write_json("evaluation.json", {"before": {"reward": None, "judge": "vader"}, "after": {"reward": 0.5}})
    page = re.sub(r">\s+<", "><", write_report(run.path).read_text())
    assert '<td>Reward</td><td class="num">–</td><td class="num">0.5</td>' in page
    assert "<td>Judge</td>" not in page


def test_a_run_without_steps_yet_has_a_page_without_plots(tmp_path):
    RunDirectory(tmp_path).config.write_text("run: {}")
    page = write_report(tmp_path).read_text()
    assert "No step has been finished yet." in page
    assert "<script" not in page


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        write_report(tmp_path)


def test_a_damaged_file_is_named(run):
    run.evaluation.write_text("{")
    with pytest.raises(DataError, match=r"evaluation\.json cannot be read"):
        write_report(run.path)


def test_long_runs_make_lean_pages(tmp_path):
    rows = [{"step": step, "time/generate": 1.0, "reward/mean": math.sin(step)} for step in range(1, 20_001)]
    charts = {chart.title: chart for chart in charts_of(rows)}
    assert max(len(trace["x"]) for trace in charts["Reward"].data) <= MAX_POINTS
    assert len(charts["Where each step's time went"].data[0]["x"]) <= MAX_BARS


def test_thinning_takes_means_of_neighbours():
    assert thin([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [2.0, 6.0, 9.0]
    assert thin([1.0, 2.0], 3) == [1.0, 2.0]


def test_running_mean_by_hand():
    assert running_mean([0.0, 3.0, 6.0, 0.0], 1) == [1.5, 3.0, 3.0, 3.0]


def test_series_leaves_out_null_and_missing():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": 2.0}]
    assert series(rows, "a") == ([1, 4], [1.0, 2.0])
