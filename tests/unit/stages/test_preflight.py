"""What is refused before anything starts: each message names the field, the value and the fix."""

import json
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import EvaluationPrompts, PromptsConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.learner import LearnerConfig, LoRAConfig
from rlhf_ray.config.load import resolve
from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.config.stages import PPOConfig, PreferencesStageConfig, ProcessRewardConfig, RewardModelConfig, SFTConfig
from rlhf_ray.data import row_readers
from rlhf_ray.data.row_readers import read_rows
from rlhf_ray.errors import ConfigError, DataError, ModelError
from rlhf_ray.stages import compare, generate, ppo, preferences, process_reward, reward_model, sft
from rlhf_ray.stages.ppo_roles import check_pretraining_text
from rlhf_ray.stages.preflight import (
    check_adapters,
    check_context,
    check_data,
    check_data_file,
    check_model,
    check_row_length,
    check_same_tokens,
    context_length,
)
from rlhf_ray.stages.reward_preflight import scored_elsewhere
from rlhf_ray.stages.run_stage import run
from tests.models import make_tiny_llama, make_tiny_reward_model, make_tiny_tokenizer
from tests.tiny_families import DECODERS, GROUPED, config_of


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama", vocab=40, hidden=32, heads=1, positions=64)


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")


def config(path, **more):
    return ModelConfig(path=str(path), **more)


def test_a_missing_file_is_named_with_where_was_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = rf"^prompts\.path=data/p\.jsonl: no such file \(relative paths start at .*{re.escape(str(tmp_path))}"
    with pytest.raises(DataError, match=said):
        check_data_file("data/p.jsonl", "prompts.path")


@pytest.mark.parametrize("path", ["p.jsonl", "p.json", "p.parquet", "p.csv", "./p", "/nowhere/p", "a/b/p", "p*.jsonl"])
def test_what_looks_like_a_file_must_be_one(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        check_data_file(path, "data.path")


def test_a_path_in_the_home_directory_is_found_as_readers_find_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        check_data(PromptsConfig(path="~/p.jsonl"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    check_data(PromptsConfig(path="~/p.jsonl"))
    assert [row["prompt"] for row in read_rows(PromptsConfig(path="~/p.jsonl").location).records] == ["a"]


def test_a_hub_name_must_be_on_the_hub_or_in_the_cache(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(row_readers, "why_unreachable", lambda: None)
    card = {"dataset_info": {"splits": [{"name": "train"}]}}
    info = huggingface_hub.hf_api.DatasetInfo(id="stanfordnlp/imdb", author=None, sha=None, cardData=card)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    check_data_file("stanfordnlp/imdb", "data.path")
    said = r"^evaluation\.prompts=stanfordnlp/imdb has no split 'test' .* it has \['train'\]. Set evaluation.split"
    with pytest.raises(DataError, match=said):
        check_data(EvaluationPrompts(path="stanfordnlp/imdb"))

    def unknown(self, name, revision, timeout):
        raise ConnectionError(f"no {name} at {revision}\nor so")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unknown)
    said = (r"^data\.path=stanfordnlp/bigSet is neither .* could not be found on the Hub at revision 'v1': "
            r"ConnectionError: no stanfordnlp/bigSet at v1\. Correct the path")
    with pytest.raises(DataError, match=said):
        check_data_file("stanfordnlp/bigSet", "data.path", "v1")
    (tmp_path / "stanfordnlp___big_set").mkdir()
    check_data_file("stanfordnlp/bigSet", "data.path", "v1")


def test_an_unknown_format_is_refused(tmp_path):
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(DataError, match=r"^data\.path=.*unknown format '\.txt'"):
        check_data_file(str(tmp_path / "p.txt"), "data.path")


def test_an_empty_file_is_refused_and_a_full_one_is_not(tmp_path):
    (tmp_path / "p.jsonl").touch()
    with pytest.raises(DataError, match=r"^data\.path=.*p\.jsonl is empty; it needs at least one row"):
        check_data_file(str(tmp_path / "p.jsonl"), "data.path")
    (tmp_path / "p.jsonl").write_text("{}\n")
    check_data_file(str(tmp_path / "p.jsonl"), "data.path")


def test_a_model_must_be_there(tmp_path, llama):
    check_model(config(llama), "model")
    with pytest.raises(ModelError, match=r"^reward_model\.path='.*gone': no such directory"):
        check_model(config(tmp_path / "gone"), "reward_model")


def test_a_tokenizer_may_not_have_ids_that_the_model_lacks(copy, llama, tmp_path):
    make_tiny_tokenizer(tmp_path / "larger", 41)
    with pytest.raises(ModelError, match=r"id 40 \(token 'w40'\).*copy has only 40 embeddings"):
        check_model(config(copy, tokenizer=str(tmp_path / "larger")), "model")


def test_fields_of_the_hub_are_refused_for_directories(llama, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.revision='v1' has no effect: .* is a directory"):
        check_model(config(llama).model_copy(update={"revision": "v1"}), "model")
    for name in ("subset", "revision"):
        with pytest.raises(DataError, match=rf"prompts\.{name}='v1' has no effect: .* is a directory"):
            check_data(PromptsConfig(path=str(tmp_path), **{name: "v1"}))


def test_a_new_model_needs_its_tokenizer(llama, tmp_path):
    shape = ArchitectureConfig(hidden_size=16, layers=1, heads=1, intermediate_size=16)
    check_model(NewModelConfig(architecture=shape, tokenizer=str(llama)), "model")
    with pytest.raises(ModelError, match="no tokenizer could be loaded from"):
        check_model(NewModelConfig(architecture=shape, tokenizer=str(tmp_path)), "model")


def test_two_models_must_mean_the_same_by_their_tokens(llama, copy):
    check_same_tokens(config(llama), config(copy), ("model", "reward_model"))
    text = (copy / "tokenizer.json").read_text()
    swapped = text.replace('"w5"', '"x"').replace('"w6"', '"w5"').replace('"x"', '"w6"')
    assert swapped != text
    (copy / "tokenizer.json").write_text(swapped)
    said = r"^model \('.*llama'\) and reward_model \('.*copy'\) have different tokenizers.*Train the reward model on"
    with pytest.raises(ModelError, match=said):
        check_same_tokens(config(llama), config(copy), ("model", "reward_model"))


def test_a_model_that_reads_the_policy_s_ids_has_all_its_embeddings(llama, copy):
    shape = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(shape | {"vocab_size": 64}))
    check_same_tokens(config(llama), config(copy), ("model", "reward_model"))
    said = r"^reward_model \('.*llama'\) has 40 embeddings and model \('.*copy'\) has 64: it has none for ids from 40"
    with pytest.raises(ModelError, match=said):
        check_same_tokens(config(copy), config(llama), ("model", "reward_model"))


def test_prompt_and_response_fill_the_context_and_no_more(llama):
    check_context(config(llama), 64, "prompts.max_tokens=32 + generator.sampling.max_tokens=32")
    said = (r"^prompts\.max_tokens=33 \+ generator\.sampling\.max_tokens=32 = 65 tokens is over the context of "
            r"'.*llama', 64; lower one of them")
    with pytest.raises(ModelError, match=said):
        check_context(config(llama), 65, "prompts.max_tokens=33 + generator.sampling.max_tokens=32")


def test_an_episode_fills_the_context_and_no_more(llama):
    said = r"^environments\.tools\.max_tokens=65 tokens are over the context of '.*llama', 64; lower it"
    with pytest.raises(ModelError, match=said):
        check_context(config(llama), 65, "environments.tools.max_tokens=65")


def test_rows_fit_into_the_context(llama):
    check_row_length(config(llama), 64, "data.max_tokens")
    with pytest.raises(ModelError, match=r"^data\.max_tokens=65 .*, 64"):
        check_row_length(config(llama), 65, "data.max_tokens")
    scratch = NewModelConfig(architecture=ArchitectureConfig(max_positions=32), tokenizer="t")
    with pytest.raises(ModelError, match=r"data\.max_tokens=33 .*'the new model', 32"):
        check_row_length(scratch, 33, "data.max_tokens")


def test_pretraining_text_is_there_and_its_rows_fit(llama, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "w2"}\n')

    def check(path, tokens):
        ptx = PtxConfig(path=str(path), max_tokens=tokens)
        check_pretraining_text(SimpleNamespace(model=config(llama), ptx=ptx))

    check(tmp_path / "text.jsonl", 64)
    with pytest.raises(ModelError, match=r"^ptx\.max_tokens=65 .*, 64"):
        check(tmp_path / "text.jsonl", 65)
    with pytest.raises(DataError, match=r"^ptx\.path=.*none\.jsonl.*no such file"):
        check(tmp_path / "none.jsonl", 64)


@pytest.fixture
def ppo_config(llama, tmp_path):
    """ppo_config(**changes): a run that passes preflight as it stands."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "w2"}\n')
    judge = make_tiny_reward_model(tmp_path / "reward", vocab=40, positions=64)

    def build(**changes):
        sections = {
            "run": {"dir": str(tmp_path / "run")}, "model": {"path": str(llama)},
            "rewards": {"main": {"type": "model", "path": str(judge)}},
            "prompts": {"path": str(tmp_path / "p.jsonl"), "max_tokens": 32},
            "generator": {"sampling": {"max_tokens": 32}}, **changes,
        }
        return PPOConfig(**sections)

    return build


def test_a_sound_ppo_configuration_passes(ppo_config, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "w2 w3"}\n')
    ppo.preflight(ppo_config(ptx={"path": str(tmp_path / "text.jsonl"), "max_tokens": 32}))


def test_rows_of_pretraining_text_and_of_saved_directories_are_read(ppo_config, tmp_path):
    import datasets

    (tmp_path / "text.jsonl").write_text('{"text": "w2 w3"}\n')
    with pytest.raises(DataError, match=r"no column 'words'.*ptx\.column"):
        ppo.preflight(ppo_config(ptx={"path": str(tmp_path / "text.jsonl"), "column": "words", "max_tokens": 32}))
    datasets.Dataset.from_dict({"question": ["w2"]}).save_to_disk(str(tmp_path / "saved"))
    ppo.preflight(ppo_config(prompts={"path": str(tmp_path / "saved"), "column": "question", "max_tokens": 32}))
    with pytest.raises(DataError, match="no column 'prompt'"):
        ppo.preflight(ppo_config(prompts={"path": str(tmp_path / "saved"), "max_tokens": 32}))
    with pytest.raises(DataError, match="was not written by `datasets`"):
        ppo.preflight(ppo_config(prompts={"path": str(tmp_path), "max_tokens": 32}))


def test_a_reward_model_is_no_policy_and_no_reference(ppo_config, tmp_path):
    for section in ("model", "reference"):
        with pytest.raises(ModelError, match=rf"^{section}: .* is a classifier .*use a language model"):
            ppo.preflight(ppo_config(**{section: {"path": str(tmp_path / "reward")}}))


def test_every_reward_model_can_read_the_longest_response(ppo_config, tmp_path):
    judge = str(make_tiny_reward_model(tmp_path / "judge", vocab=40, positions=48))
    with pytest.raises(ModelError, match=r"= 64 tokens is over the context of '.*judge', 48"):
        ppo.preflight(ppo_config(logging={"judge": judge}))
    evaluation = {"prompts": str(tmp_path / "p.jsonl"), "sampling": {"max_tokens": 16}}
    short = ppo_config(generator={"sampling": {"max_tokens": 8}}, evaluation=evaluation, logging={"judge": judge})
    ppo.preflight(resolve(short))
    evaluation["sampling"]["max_tokens"] = 17
    short = ppo_config(generator={"sampling": {"max_tokens": 8}}, evaluation=evaluation, logging={"judge": judge})
    with pytest.raises(ModelError, match=r"evaluation\.sampling\.max_tokens=17 = 49 tokens .*judge', 48"):
        ppo.preflight(resolve(short))


@pytest.mark.parametrize("changes, error, said", [
    ({"prompts": {"path": "/none.jsonl", "max_tokens": 32}}, DataError, "prompts.path=/none.jsonl"),
    ({"evaluation": {"prompts": "/none.jsonl"}}, DataError, "evaluation.prompts=/none.jsonl"),
    ({"model": {"path": "/none"}}, ModelError, "model.path='/none'"),
    ({"rewards": {"main": {"type": "model", "path": "/none"}}}, ModelError, "rewards.main.path='/none'"),
    ({"generator": {"sampling": {"max_tokens": 40}}}, ModelError, "= 72 tokens is over the context"),
])
def test_ppo_is_refused_before_its_directory_exists(ppo_config, tmp_path, changes, error, said):
    with pytest.raises(error, match=re.escape(said)):
        ppo.run(ppo_config(**changes))
    assert not (tmp_path / "run").exists()


def supervised(cls, llama, tmp_path, budget):
    rows = [{"text": "w2 w3", "prompt": prompt, "chosen": "w3", "rejected": "w4"} for prompt in ("w2", "w5")]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return cls(run={"dir": str(tmp_path / "run")}, model={"path": str(llama)},
               data={"path": str(tmp_path / "d.jsonl"), "max_tokens": 20}, learner={"micro_batch_tokens": budget})


@pytest.mark.parametrize("stage, cls, budget, said", [
    (sft, SFTConfig, 19, "learner.micro_batch_tokens=19 is less than data.max_tokens=20"),
    (reward_model, RewardModelConfig, 39, "learner.micro_batch_tokens=39 cannot hold a pair of two rows"),
])
def test_a_micro_batch_must_hold_the_longest_row(stage, cls, budget, said, llama, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(stage, "run_supervised", lambda it, resume: started.append((it.name, resume)))
    with pytest.raises(ConfigError, match=re.escape(said)):
        stage.run(supervised(cls, llama, tmp_path, budget))
    assert not started
    stage.run(supervised(cls, llama, tmp_path, budget + 1), resume=True)
    assert started == [(stage.__name__.rsplit(".")[-1], True)]



@pytest.mark.parametrize(("target", "scalar", "said"), [
    ("q_prj", False, r"^policy\.lora\.targets names 'q_prj': LlamaForCausalLM has no such layer\. Valid names: "
                     "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear"),
    ("proj", False, "no such layer"),
    ("embed_tokens", False, r"model\.embed_tokens is of type Embedding"),
    ("lm_head", False, "lm_head is also the token embedding's"),
    ("lm_head", True, "LlamaForSequenceClassification has no such layer"),
    ("score", True, "the scalar head is always trained in full"),
])
def test_adapters_stand_beside_layers_that_the_model_has(llama, target, scalar, said):
    learner = LearnerConfig(lora=LoRAConfig(targets=["q_proj", target]))
    with pytest.raises(ModelError, match=said):
        check_adapters(learner, config(llama), "policy", scalar)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"], ["layers.0.mlp.up_proj", "v_proj"]])
def test_layers_that_are_there_can_be_named(llama, targets):
    check_adapters(LearnerConfig(lora=LoRAConfig(targets=targets)), config(llama), "policy", scalar=False)
    check_adapters(LearnerConfig(lora=None), config("nowhere"), "policy", scalar=False)


def test_ppo_looks_at_the_layers_before_it_starts(llama, tmp_path):
    reward = make_tiny_reward_model(tmp_path / "reward", 40, positions=64)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w2"}\n')
    sections = {"model": {"path": str(llama)}, "rewards": {"main": {"type": "model", "path": str(reward)}},
                "prompts": {"path": str(tmp_path / "prompts.jsonl"), "max_tokens": 8},
                "generator": {"sampling": {"max_tokens": 8}}}
    for role in ("policy", "critic"):
        with pytest.raises(ModelError, match=rf"^{role}\.lora\.targets names 'c_attn'"):
            ppo.preflight(PPOConfig(**sections, **{role: {"lora": {"targets": ["c_attn"]}}}))


def test_adapters_beside_random_weights_are_refused():
    scratch = NewModelConfig(architecture=ArchitectureConfig(), tokenizer="t")
    with pytest.raises(ConfigError, match=r"^learner\.lora .* random weights"):
        check_adapters(LearnerConfig(lora=LoRAConfig()), scratch, "learner", scalar=False)


@pytest.mark.parametrize("section", ["prompts", "evaluation"])
def test_malformed_rows_are_named_before_anything_starts(ppo_config, tmp_path, section):
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"prompt": "w2"}\n{"prompt": 5}\n{torn\n')
    changes = {"path": str(rows), "max_tokens": 32} if section == "prompts" else {"prompts": str(rows)}
    with pytest.raises(DataError, match=r"(?s)2 rows cannot be used:.*line 2: .*line 3: not valid JSON"):
        ppo.run(ppo_config(**{section: changes}))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def with_rewards(ppo_config, tmp_path):
    """with_rewards(section, **sections): that configuration with one more reward, `extra`, of this section."""
    (tmp_path / "mine.py").write_text("def score(responses): return [0.0] * len(responses)\ndef odd(texts): pass")

    def build(section, **sections):
        main = ppo_config().rewards["main"].model_dump()
        return ppo_config(rewards={"main": main, "extra": section}, **sections)

    return build


def test_sound_rewards_pass(with_rewards, tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"prompt": "w2", "answer": 3}\n')
    for section in ({"type": "function", "function": f"{tmp_path}/mine.py:score"}, {"type": "number"},
                    {"type": "regex", "pattern": "w(.)", "group": 1}, {"type": "json_schema", "accepts": {}}):
        ppo.preflight(with_rewards(section, prompts={"path": str(tmp_path / "answers.jsonl"), "max_tokens": 32}))


@pytest.mark.parametrize("section, error, said", [
    ({"type": "function", "function": "TMP/mine.py:none"}, ConfigError, "(rewards.extra) cannot be used: Attribute"),
    ({"type": "function", "function": "TMP/mine.py:odd"}, ConfigError,
     "it requires texts, which is no column"),
    ({"type": "function", "function": "no_such_module:f"}, ConfigError, "No module named 'no_such_module'"),
    ({"type": "json_schema", "accepts": "TMP/none.json"}, ConfigError, "rewards.extra.accepts="),
    ({"type": "json_schema", "accepts": {"type": 3}}, ConfigError, "rewards.extra.accepts is not a JSON schema"),
    ({"type": "number"}, DataError, "p.jsonl, line 1 (prompts.path) has no such column"),
    ({"type": "exact_match", "answer": "truth"}, DataError, "has no such column; other columns: none"),
    ({"type": "exact_match", "answer": "prompt"}, DataError, "has no such column; other columns: none"),
    ({"type": "regex", "pattern": "(a)", "group": 1, "answer": "truth"}, DataError, "rewards.extra.answer='truth'"),
    ({"type": "model", "path": "/none"}, ModelError, "rewards.extra.path='/none'"),
    ({"type": "process", "path": "/none"}, ModelError, "rewards.extra.path='/none'"),
    ({"type": "http", "urls": ["http://127.0.0.1:9"], "timeout_s": 1, "retries": 0}, ConfigError, "rewards.extra"),
])
def test_rewards_that_cannot_be_given_are_refused(with_rewards, tmp_path, section, error, said):
    told = {key: value.replace("TMP", str(tmp_path)) if isinstance(value, str) else value
            for key, value in section.items()}
    with pytest.raises(error, match=re.escape(said)):
        ppo.preflight(with_rewards(told))


def test_every_row_with_an_answer_that_is_not_one_number_is_named(with_rewards, tmp_path):
    answers = ["\\sqrt{2}", "1{,}000", "\\frac34", "(3,4)"]
    (tmp_path / "answers.jsonl").write_text("".join(
        json.dumps({"prompt": "w2", "answer": answer}) + "\n" for answer in answers))
    prompts = {"path": str(tmp_path / "answers.jsonl"), "max_tokens": 32}
    with pytest.raises(DataError) as caught:
        ppo.preflight(with_rewards({"type": "number"}, prompts=prompts))
    told = str(caught.value)
    assert told.startswith("2 rows cannot be used:") and "use exact_match or a function" in told
    assert [line in told for line in ("line 1 ", "line 2 ", "line 3 ", "line 4 ")] == [True, False, False, True]


def test_a_reward_model_whose_end_is_its_padding_gets_a_warning(with_rewards, tmp_path):
    path = make_tiny_reward_model(tmp_path / "r", 40)
    config = with_rewards({"type": "model", "path": str(path)})
    assert scored_elsewhere(config) == []
    shape = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**shape, "pad_token_id": 1}))
    [warning] = scored_elsewhere(config)
    assert warning.startswith(f"rewards.extra.path={str(path)!r} has its end-of-sequence token as padding token")


def test_answers_that_hold_no_number_are_refused(with_rewards, tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"prompt": "w2", "answer": "A", "worked": "7 more #### 3"}\n')
    prompts = {"path": str(tmp_path / "answers.jsonl"), "max_tokens": 32}
    ppo.preflight(with_rewards({"type": "number", "answer": "worked", "after": "####"}, prompts=prompts))
    said = r"rewards\.extra\.answer='answer': .*answers.jsonl, line 1 \(prompts\.path\) is 'A', which a reward of type"
    with pytest.raises(DataError, match=said):
        ppo.preflight(with_rewards({"type": "number"}, prompts=prompts))


@pytest.mark.parametrize("section, answer", [
    ({"type": "exact_match"}, " "), ({"type": "exact_match"}, ["a", "b"]), ({"type": "number"}, [1, 2]),
    ({"type": "regex", "pattern": "(a)", "group": 1}, ""), ({"type": "json_schema", "accepts": {}}, float("nan")),
])
def test_answers_that_nothing_can_equal_are_refused(with_rewards, tmp_path, section, answer):
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": "w2", "answer": answer}) + "\n")
    prompts = {"path": str(tmp_path / "answers.jsonl"), "max_tokens": 32}
    said = rf"rewards\.extra\.answer='answer': .* a reward of type {section['type']} cannot compare"
    with pytest.raises(DataError, match=said):
        ppo.preflight(with_rewards({**section, "answer": "answer"}, prompts=prompts))


def test_answers_are_looked_for_beyond_the_first_row(with_rewards, tmp_path):
    (tmp_path / "answers.jsonl").write_text(
        '{"prompt": "w2", "answer": 3}\n' * 20 + '{"prompt": "w2", "answer": "A"}\n')
    prompts = {"path": str(tmp_path / "answers.jsonl"), "max_tokens": 32}
    with pytest.raises(DataError, match=r"answers\.jsonl, line 21 \(prompts\.path\) is 'A'"):
        ppo.preflight(with_rewards({"type": "number"}, prompts=prompts))
    ppo.preflight(with_rewards({"type": "number"}, prompts={**prompts, "limit": 20}))


@pytest.mark.parametrize(("rows", "refused"), [(5, True), (1001, False)])
def test_a_small_file_of_prompts_that_are_all_too_long_is_refused_at_once(ppo_config, tmp_path, rows, refused):
    (tmp_path / "p.jsonl").write_text('{"prompt": "w2 w3 w4 w5 w6"}\n' * rows)
    sections = {"path": str(tmp_path / "p.jsonl"), "max_tokens": 4}
    config = ppo_config()
    config = config.model_copy(update={"prompts": config.prompts.model_copy(update=sections)})
    if refused:
        with pytest.raises(DataError, match=r"no row is left.*longer than max_tokens=4.*shortest prompt has 5 tokens"):
            ppo.preflight(config)
    else:  # the other rows may be shorter, and are not looked at yet
        ppo.preflight(config)


@pytest.mark.parametrize(("section", "field"), [("prompts", "prompts.column"), ("evaluation", "evaluation.column")])
def test_a_missing_column_is_told_once_with_its_field(ppo_config, tmp_path, section, field):
    (tmp_path / "q.jsonl").write_text('{"question": "w2"}\n' * 30)
    path = {"path": str(tmp_path / "q.jsonl"), "max_tokens": 32}
    with pytest.raises(DataError) as raised:
        ppo.preflight(ppo_config(**{section: path if section == "prompts" else {"prompts": path["path"]}}))
    assert str(raised.value).count("no column 'prompt'") == 1 and f"Set {field}," in str(raised.value)


def test_a_held_out_file_needs_the_answers_too(with_rewards, tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"prompt": "w2", "answer": 3}\n')
    config = with_rewards({"type": "number"}, prompts={"path": str(tmp_path / "answers.jsonl"), "max_tokens": 32},
                          evaluation={"prompts": str(tmp_path / "p.jsonl")})
    with pytest.raises(DataError, match=r"p\.jsonl, line 1 \(evaluation\.prompts\) has no such column"):
        ppo.preflight(config)


def test_a_critic_starts_from_a_reward_model_of_the_policy_s_tokens_alone(ppo_config, tmp_path):
    other = make_tiny_reward_model(tmp_path / "other", vocab=48, positions=64)
    rewards = {"main": {"type": "model", "path": str(other)}}
    ppo.preflight(ppo_config(rewards=rewards))
    with pytest.raises(ModelError, match=r"from which critic\.init=reward starts.* have different tokenizers"):
        ppo.preflight(ppo_config(rewards=rewards, critic={"init": "reward"}))


@pytest.mark.parametrize("choice", [{"label": 0}, {"value": "probability"}])
def test_a_critic_starts_from_no_head_whose_reward_is_not_its_only_output(choice, ppo_config, tmp_path):
    reward = make_tiny_reward_model(tmp_path / "reward", vocab=40, positions=64)
    config = ppo_config(rewards={"main": {"type": "model", "path": str(reward), **choice}}, critic={"init": "reward"})
    with pytest.raises(ConfigError, match=rf"critic\.init=reward .*\(rewards\.main\.{next(iter(choice))}=.*set"):
        ppo.preflight(config)


def test_a_switch_that_lets_vllm_unpickle_is_refused(ppo_config, monkeypatch):
    from rlhf_ray.config.generation import GenerationConfig
    from rlhf_ray.roles.engines.vllm_adapter import generator_environment

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    for begin in (lambda: ppo.preflight(ppo_config()), lambda: generator_environment(GenerationConfig())):
        with pytest.raises(ConfigError, match=r"VLLM_ALLOW_INSECURE_SERIALIZATION=1 lets vLLM unpickle.*unset it"):
            begin()
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in generator_environment(GenerationConfig())


@pytest.fixture
def of_family(llama, tmp_path):
    """of_family(name, **shape) -> a model directory whose configuration is another family's."""

    def make(name, **shape):
        directory = shutil.copytree(llama, tmp_path / name)
        config_of(name, **{**GROUPED, "vocab_size": 40, "max_position_embeddings": 64, **shape}).save_pretrained(
            directory)
        return directory

    return make


@pytest.mark.parametrize(("family", "limit"), [("llama", 32), ("gpt2", 32), ("mpt", 32), ("bloom", None)])
def test_the_context_is_found_by_each_family_s_name_for_it(copy, family, limit):
    config_of(family, **DECODERS[family]).save_pretrained(copy)
    assert context_length(config(copy)) == limit
    with pytest.raises(ModelError, match="context of .*, 32") if limit else nullcontext():
        check_context(config(copy), 33, "a=30 + b=3")


def test_a_family_s_own_context_holds_where_config_json_is_silent(copy):
    shape = json.loads((copy / "config.json").read_text())
    shape.pop("max_position_embeddings")
    (copy / "config.json").write_text(json.dumps(shape))
    assert context_length(config(copy)) == LlamaConfig().max_position_embeddings
    assert context_length(config("some/name")) is None


def test_every_stage_refuses_what_is_known_not_to_work(of_family, llama, tmp_path, ppo_config):
    """Before anything starts, with the section that names the model."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "w2"}\n')
    data, model = {"path": str(tmp_path / "p.jsonl"), "max_tokens": 20}, {"path": str(of_family("rwkv"))}
    run = {"dir": str(tmp_path / "run")}
    said = r"^model: '.*rwkv' is of the family 'rwkv', which cannot be used for .* changes its weights"
    steps = {"separator": "w5", "placeholder": "w6", "good": "w7", "bad": "w8"}
    for stage, config_ in (
        (sft, SFTConfig(run=run, model=model, data=data)),
        (reward_model, RewardModelConfig(run=run, model=model, data=data)),
        (process_reward, ProcessRewardConfig(run=run, model=model, data=data, steps=steps)),
        (ppo, ppo_config(model=model)),
    ):
        with pytest.raises(ModelError, match=said):
            stage.preflight(config_)
    rewards = {"main": {"type": "process", "path": model["path"]}}
    with pytest.raises(ModelError, match=said.replace("model:", r"rewards\.main:")):
        ppo.preflight(ppo_config(rewards=rewards))
    untied = {"path": str(of_family("cohere", tie_word_embeddings=False))}
    with pytest.raises(ModelError, match=r"^model: '.*cohere'.*cannot be used for generation .*for its head"):
        preferences.preflight(PreferencesStageConfig(run=run, model=untied, prompts=data, pairs={}))
    sampling = SamplingConfig(max_tokens=4)
    with pytest.raises(ModelError, match=r"^MODEL: '.*cohere'.*cannot be used for generation"):
        generate.run(generate.GenerateOptions(untied["path"], sampling, prompts=["w2"]), None)
    with pytest.raises(ModelError, match=r"^B: '.*cohere'.*cannot be used for generation"):
        compare.run(compare.CompareOptions(str(llama), untied["path"], data["path"], "vader", tmp_path / "c.html",
                                           sampling))


def test_a_stage_refuses_sections_that_do_not_fit_together_however_it_was_configured():
    for config in (
        SFTConfig(model={"path": "m"}, data={"path": "d"}, learner={"cpus": 9}),
        PreferencesStageConfig(model={"path": "m"}, prompts={"path": "p"}, generator={"cpus": 9}),
        PPOConfig(model={"path": "m"}, prompts={"path": "p"}, generator={"cpus": 9},
                  rewards={"main": {"type": "model", "path": "r"}}),
    ):
        with pytest.raises(ConfigError, match="cpus=9 is more than a bundle of pools.default has"):
            run(config)


def test_ppo_refuses_what_cannot_be_generated_and_rows_beyond_scaled_positions(of_family, ppo_config):
    with pytest.raises(ModelError, match=r"^model: .*'cohere'.*generation with vLLM"):
        ppo.preflight(ppo_config(model={"path": str(of_family("cohere", tie_word_embeddings=False))}))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 63}
    scaled = ppo_config(model={"path": str(of_family("llama", rope_parameters=rope))})
    said = r"^prompts\.max_tokens \+ generator\.sampling\.max_tokens=64 .* context before dynamic .*, 63"
    with pytest.raises(ModelError, match=said):
        ppo.preflight(scaled)
