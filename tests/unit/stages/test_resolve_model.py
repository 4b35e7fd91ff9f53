"""What `generate` and `compare` refuse before a model is loaded: places to write to, and pairs without a difference."""

import io

import pytest

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages import compare, generate
from rlhf_ray.stages.resolve_model import check_output


def test_a_folder_is_made_and_nothing_is_left_in_it(tmp_path):
    check_output(tmp_path / "new" / "answers.jsonl")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_or_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a folder"):
        check_output(tmp_path)
    with pytest.raises(ConfigError, match=r"--output .*file/answers.jsonl cannot be written"):
        check_output(tmp_path / "file" / "answers.jsonl")


def test_generate_looks_before_it_loads(tmp_path):
    options = generate.GenerateOptions(model="nowhere/at/all", sampling=SamplingConfig(), prompts=["a"],
                                       output=tmp_path)
    with pytest.raises(ConfigError, match="is a folder"):
        generate.run(options, io.StringIO())


def test_compare_refuses_to_draw_the_same_pair_again(tmp_path):
    options = compare.CompareOptions(first="nowhere/a", second="nowhere/b", prompts="p.jsonl", scorer="vader", n=3,
                                     output=tmp_path / "c.html", sampling=SamplingConfig(temperature=0))
    with pytest.raises(ConfigError, match="the same pair 3 times"):
        compare.run(options)


def test_compare_refuses_to_write_its_page_over_its_numbers(tmp_path):
    options = compare.CompareOptions(first="nowhere/a", second="nowhere/b", prompts="p.jsonl", scorer="vader",
                                     output=tmp_path / "c.json", sampling=SamplingConfig())
    with pytest.raises(ConfigError, match=r"name the page, e\.g\. .*c\.html"):
        compare.run(options)
