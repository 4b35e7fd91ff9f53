"""The study of growing cost: what is fitted, what is kept, and the paper model's check against it."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster_model.check import UNKNOWN, fitted_hardware, predict, predictions, typical_error
from benchmarks.cluster_model.report import checked
from benchmarks.growth.cells import Cell, Study
from benchmarks.growth.measured_role import ANY_LENGTH, Role, repeated
from benchmarks.growth.report import (
    charts,
    exponents,
    law,
    markdown,
    over_length,
    over_parameters,
    power_law,
    write_plot,
)
from benchmarks.growth.roles import ROLES
from benchmarks.growth.settings import LENGTHS, PROMPT, SIZES, Size
from benchmarks.svg import axis, logarithmic_ticks

CORE = replace(UNKNOWN, flops=60e9, training_share=0.8, memory_bandwidth=8e9, network_bandwidth=3e9,
               host_bandwidth=2e9, step_s=0.002)
RUN = {"commit": "aaaa", "machine": {"cores": 2}}


def every_cell(seconds: float = 1.0) -> list[Cell]:
    return [Cell(size.name, size.parameters, name, *task, role.samples(size, task), [seconds] * 3, 512.0)
            for size in SIZES for name, role in ROLES.items() for task in role.tasks()]


def cells_of() -> list[Cell]:
    """Cells as measured on a core with these constants: what the formulas say of them, which is checked below."""
    return [replace(cell, seconds=[predict(cell, CORE)]) for cell in every_cell()]


def by_hand(activity: str, length: int) -> float:
    """Seconds of a cell of the 5M model on `CORE`: 6 layers of width 256, gated feed-forward layers of 768, and 1024
    words, tied, in float32. Two operations a weight, four a value attended to, half a row on average."""
    layer = 4 * 256 * 256 + 3 * 256 * 768
    body, head, row = 6 * layer, 1024 * 256, 16 + length
    weights = body + head
    rows = 8 * 1040 // row

    def forward(multiplied: int, tokens: float) -> float:
        return tokens * (2 * multiplied + 4 * 6 * 256 * tokens / 2)

    if activity in ("reference", "log-probabilities"):
        return rows * forward(weights, row) / 60e9
    if activity in ("reward", "values"):
        return rows * forward(body, row) / 60e9
    if activity in ("policy update", "critic update"):
        multiplied = weights if activity == "policy update" else body
        return 3 * rows * forward(multiplied, row) / (60e9 * 0.8) + 32 * weights / 8e9
    if activity == "send weights":
        return 4 * weights / 3e9
    if activity == "receive weights":
        return 4 * weights / 2e9
    steps = 0.0
    for position in range(length):
        held = 16 + position + 0.5
        read = (4 * weights + 8 * held * 2 * 6 * 256 * 4) / 8e9
        compute = 8 * (2 * weights + 4 * 6 * 256 * held) / 60e9
        steps += max(read, compute) + 0.002
    return 8 * forward(weights, 16) / 60e9 + steps


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_size_is_called_by_its_parameters(size: Size) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = size.architecture
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=1024, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
            intermediate_size=shape.intermediate_size, tie_word_embeddings=True))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.parameters / 1e6 == pytest.approx(float(size.name.removesuffix("M")), rel=0.1)


class TestFit:
    """Power laws."""

    def test_a_law_is_found_again(self) -> None:
        found = power_law([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)])
        assert found and (found.exponent, found.factor, found.residual) == pytest.approx((1.5, 3, 0), abs=1e-9)

    def test_the_residual_says_how_far_off_it_is(self) -> None:
        found = power_law([1, 10, 100, 1000], [1.1, 10 / 1.1, 100 / 1.1, 1100])
        assert found and found.exponent == pytest.approx(1.0) and found.residual == pytest.approx(0.1)

    def test_two_points_fit_any_line(self) -> None:
        assert power_law([1], [2]) is None
        assert law(power_law([1, 2], [1, 2])) == "1.00"
        assert law(power_law([1, 2, 4], [1, 2, 4])) == "1.00 (±0%)"

    def test_skipped_cells_are_left_out(self) -> None:
        cells = [replace(cell, seconds=[cell.parameters * cell.samples * (cell.length + PROMPT) / 1e9])
                 for cell in every_cell() if cell.activity == "reference"]
        found = over_parameters(cells, "reference", 128)
        assert found and found.points == 4 and found.exponent == pytest.approx(1.0)
        fewer = [replace(cell, seconds=[]) if cell.size == "100M" else cell for cell in cells]
        assert over_parameters(fewer, "reference", 128).points == 3  # type: ignore[union-attr]
        assert over_length(fewer, "reference", "100M") is None


class TestRole:
    """How a role is repeated, and when it is spared."""

    class Sleepy(Role):
        ACTIVITIES, ANY = ("sleeps", "wakes"), ("publishes",)

        def start(self) -> None:
            self.seconds = {32: 1.0, 128: 10.0, 512: 100.0, 1024: 1.0}

        def work(self, activity, length, rows):  # type: ignore[no-untyped-def]
            return lambda: self.seconds.get(length, 1.0)

    def test_work_is_repeated_while_there_is_time(self) -> None:
        assert repeated(lambda: 1.0) == [1.0] * 3
        assert repeated(lambda: 3.0) == [3.0] * 2
        assert repeated(lambda: 60.0) == [60.0]

    def test_what_would_take_too_long_is_skipped_with_all_longer_ones(self, tmp_path: Path) -> None:
        role = self.Sleepy(replace(SIZES[0], tokens=1), tmp_path)
        proofs = [(role.run(), role.proof())[1] for _ in self.Sleepy.tasks()]
        assert [len(proof) - 2 for proof in proofs[:4]] == [3, 1, 1, 0], "100 s at 512 tokens: 200 s at 1024"
        assert len(proofs[4]) > 2, "another activity begins anew"
        assert len(proofs) == 2 * len(LENGTHS) + 1 and len(proofs[-1]) == 5
        assert proofs[0][0] > 10, "MiB of this process"

    def test_activities_without_a_length_come_once(self) -> None:
        assert self.Sleepy.tasks()[-1] == ("publishes", ANY_LENGTH)
        assert self.Sleepy.samples(SIZES[0], ("publishes", ANY_LENGTH)) == 1


class TestStudy:
    """What is on disk."""

    def test_roles_that_are_there_are_not_measured_again(self, tmp_path: Path) -> None:
        study = Study(tmp_path)
        study.add([cell for cell in every_cell() if cell.size == "1M" and cell.role == "generator"], RUN)
        again = Study(tmp_path)
        assert again.cells == study.cells and again.runs == [RUN]
        assert again.has(SIZES[0], "generator")
        assert not again.has(SIZES[1], "generator") and not again.has(SIZES[0], "policy learner")

    def test_other_settings_begin_anew(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Study(tmp_path).add(every_cell(), RUN)
        path = tmp_path / "growth.json"
        told = json.loads(path.read_text())
        path.write_text(json.dumps(told | {"settings": told["settings"] | {"prompt": 99}}))
        assert Study(tmp_path).cells == []
        assert "begun anew" in capsys.readouterr().err


class TestReport:
    """Tables and drawing."""

    def test_every_activity_and_size_has_its_row_and_skipped_cells_say_so(self) -> None:
        cells = [replace(cell, seconds=[]) if (cell.size, cell.activity, cell.length) == ("100M", "generation", 1024)
                 else cell for cell in every_cell()]
        told = markdown(cells)
        assert "| generation | 100M | 125 | 125 | 125 | over 150 s, skipped |" in told
        assert "| receive weights | 5M | 1,000 in all |" in told
        rows = exponents(cells).splitlines()[2:]
        assert len(rows) == len({cell.activity for cell in cells}) == 9
        assert all("512 / 512 / 512 / 512" in row for row in rows)

    def test_the_drawing_has_a_line_for_every_activity(self, tmp_path: Path) -> None:
        path = write_plot(every_cell(), tmp_path)
        names = [line.findtext("{*}title") for line in ET.parse(path).getroot().findall(".//{*}polyline")]
        assert names == [line.name for chart in charts(every_cell()) for line in chart.lines] and len(names) == 27

    @pytest.mark.parametrize(("lowest", "highest", "expected"), [
        (0.98, 100, [0.5, 1, 2, 5, 10, 20, 50, 100]), (32, 1024, [20, 50, 100, 200, 500, 1000, 2000]),
        (0.03, 700, [0.01, 0.1, 1, 10, 100, 1000]), (5, 5, [5, 10])])
    def test_logarithmic_axes_hold_all_values(self, lowest: float, highest: float, expected: list[float]) -> None:
        assert logarithmic_ticks(lowest, highest) == pytest.approx(expected)
        scale = axis([lowest, highest], True)
        assert 0 <= scale.place(lowest) <= scale.place(highest) <= 1


class TestCheck:
    """The paper model's formulas against cells."""

    def test_constants_are_found_again_where_the_formulas_hold(self) -> None:
        core, used = fitted_hardware(cells_of())
        assert len(used) == 6
        assert core is not CORE
        for name in ("flops", "training_share", "memory_bandwidth", "network_bandwidth", "host_bandwidth", "step_s"):
            # AdamW's share in an update is not taken out of the constant.
            within = 0.1 if name == "training_share" else 0.01
            assert getattr(core, name) == pytest.approx(getattr(CORE, name), rel=within), name

    def test_the_formulas_are_those_worked_out_by_hand(self) -> None:
        cells = [cell for cell in every_cell() if cell.size == "5M"]
        assert {cell.activity for cell in cells} == {cell.activity for cell in every_cell()}
        for cell in cells:
            assert predict(cell, CORE) == pytest.approx(by_hand(cell.activity, cell.length), rel=2e-3), cell

    def test_all_cells_are_predicted_then(self) -> None:
        found = predictions(cells_of())
        assert len(found) == len(every_cell())
        assert typical_error(found) < 0.02
        assert all(0.8 < p.ratio < 1.25 for p in found)

    def test_a_core_twice_as_slow_in_one_cell_shows_there(self) -> None:
        slow = [replace(cell, seconds=[2 * cell.seconds[0]])
                if (cell.activity, cell.size, cell.length) == ("values", "5M", 512) else cell for cell in cells_of()]
        row = next(row for row in checked(predictions(slow)).splitlines() if row.startswith("| values | 5M"))
        assert float(row.split("|")[5]) == pytest.approx(0.5, abs=0.02)

    def test_without_the_middle_size_a_smaller_one_gives_the_constants(self) -> None:
        core, used = fitted_hardware([cell for cell in cells_of() if cell.size != "25M"])
        assert {cell.size for cell in used} == {"1M", "5M"}
        assert core.memory_bandwidth == pytest.approx(CORE.memory_bandwidth, rel=0.01)

    def test_what_has_to_be_measured_is_named(self) -> None:
        with pytest.raises(ValueError, match="neither 25M nor 5M was measured whole.*--sizes 1M 25M"):
            fitted_hardware([cell for cell in cells_of() if cell.size not in ("25M", "5M")])
