"""Episodes token by token: an oracle that plays them by hand, with vLLM's own interface and texts that are written out
here, must have the same ids, masks, log-probabilities and versions."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from tests.chat_templates import KINDS, make_chat_tokenizer
from tests.cluster import by_hand as by_hand_process
from tests.cluster.episode_world import Talk
from tests.cluster.generators import load_model, reference_logprobs
from tests.models import make_tiny_llama

pytestmark = pytest.mark.cluster
WORLD = f"{Path(__file__).parent / 'episode_world.py'}:Talk"
VOCAB = 448
CONTEXT = 384
RUN_SEED = 11
STOPS = list(range(30, 110))
"""Of a random model's tokens, one in six ends a turn."""
SAMPLING = SamplingConfig(max_tokens=24, stop_token_ids=STOPS)
AFTER = {
    ("qwen2.5", "user"): "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    ("qwen2.5", "tool"): "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
                         "<|im_start|>assistant\n",
    ("qwen3", "tool"): "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
                       "<|im_start|>assistant\n",
    ("llama3.1", "user"): "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
                          "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ("llama3.1", "tool"): "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n\"{}\"<|eot_id|>"
                          "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ("gemma", "user"): "<end_of_turn>\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    ("gemma", "tool"): "<end_of_turn>\n<start_of_turn>user\nResult of count:\n{}<end_of_turn>\n"
                       "<start_of_turn>model\n",
    ("mistral", "user"): "</s>[INST] {}[/INST]",
    ("mistral", "tool"): '</s>[TOOL_RESULTS] {{"content": "{}", "call_id": "{id}"}}[/TOOL_RESULTS]',
}
"""What each template writes between two turns, from the end of the first to the beginning of the second. None for a
message of the user with qwen3, which rewrites what came before."""
CASES = [(kind, role) for kind in KINDS for role in ("user", "tool")]


class Direct:
    """Generators without Ray: calls go to each in turn."""

    def __init__(self, *generators):
        self.generators = generators
        self.calls = 0

    async def call(self, method, *args, work=1, sticky=None, **named):
        """As `PeerGroup.call`."""
        self.calls += 1
        return await getattr(self.generators[self.calls % len(self.generators)], method.__name__)(*args, **named)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory for each kind: the same weights, with the tokenizer of the kind."""
    root = tmp_path_factory.mktemp("models")
    weights = make_tiny_llama(root / "weights", VOCAB, positions=1024)
    for kind in KINDS:
        shutil.copytree(weights, root / kind, ignore=shutil.ignore_patterns("*token*"))
        make_chat_tokenizer(root / kind, kind)
    return root


@pytest.fixture(scope="module")
def generator(models, loop):
    started = make_generator(models)
    loop.run_until_complete(started.start())
    yield started
    loop.run_until_complete(started.stop())


@pytest.fixture(scope="module")
def by_hand(models, generator):
    """vLLM's own class for whole texts, with the same weights."""
    with by_hand_process.process(models / "qwen2.5", CONTEXT) as pool:
        yield lambda *request: pool.submit(by_hand_process.sample, *request).result(timeout=120)


def make_generator(models):
    settings = GenerationConfig(max_sequences=8, kv_cache_mb=16, sampling=SAMPLING)
    return Generator(ModelConfig(path=str(models / "qwen2.5")), settings, seed=0, max_context=CONTEXT)


def prompts_of(kind_role_turns):
    """A row for each (role, turns)."""
    rows = len(kind_role_turns)
    return Prompts(offsets_of([1] * rows), np.zeros(rows, np.int32), ["unread"] * rows,
                   [{"role": role, "turns": turns, "number": i} for i, (role, turns) in enumerate(kind_role_turns)],
                   np.arange(rows))


def play(loop, models, kind, generators, prompts, keys, **settings):
    """A rollout of a runner of its own."""
    config = EnvironmentConfig(path=WORLD, **{"max_tokens": CONTEXT, "max_turns": 8, **settings})
    runner = EpisodeRunner({"talk": config}, ModelConfig(path=str(models / kind)), SAMPLING, generators)

    async def run():
        await runner.start()
        try:
            return await runner.play(prompts, keys, RUN_SEED)
        finally:
            await runner.stop()

    return loop.run_until_complete(run())


def hashed(text, bits):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> (64 - bits)


def played_by_hand(models, kind, role, row, key, sample, stops):
    """(rows of tokens, mask and log-probabilities; cause) of an episode."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / kind)

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    seed = hashed(f"{RUN_SEED}/{key.epoch}/{key.row}/{key.sample}", 63)
    world = Talk()
    talk = world.reset(row, hashed(f"environment/{RUN_SEED}/{key.epoch}/{key.row}", 31))["messages"]
    ids = ids_of(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
    rows = [(list(ids), [False] * len(ids), [0.0] * len(ids))]
    end = tokenizer.eos_token_id
    while True:
        tokens, mask, logprobs = rows[-1]
        most = min(SAMPLING.max_tokens, CONTEXT - len(tokens))
        if most < 1:
            return rows, "truncated_episode"
        read = hashlib.blake2b(np.array(tokens, dtype="<i4").tobytes(), digest_size=12).hexdigest()
        found, scores, reason = sample(list(tokens), hashed(f"{seed}/{read}/0", 63), most, stops)
        tokens += found
        mask += [True] * len(found)
        logprobs += scores
        if reason == "length":
            return rows, "truncated_turn" if most == SAMPLING.max_tokens else "truncated_episode"
        ended = found[-1] == end
        named = {end, *generator_stops(models, kind)}
        text = tokenizer.decode(found[:-1] if found[-1] in named else found, skip_special_tokens=False,
                                clean_up_tokenization_spaces=False)
        step = world.step(type("Reply", (), {"text": text}))
        if step["done"]:
            return rows, "completed"
        [message] = step["messages"]
        talk += [{"role": "assistant", "content": text.strip()}, message]
        if (kind, role) in AFTER:
            between = AFTER[kind, role].format(message["content"], id=message.get("tool_call_id"))
            read = ids_of(between)
            read = read[1:] if ended else read
            tokens += read
            mask += [False] * len(read)
            logprobs += [0.0] * len(read)
        else:
            ids = ids_of(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
            rows.append((list(ids), [False] * len(ids), [0.0] * len(ids)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_that_plays_by_hand_has_the_same_tokens(kind, loop, models, generator, by_hand):
    rows = [(role, turns) for role in ("user", "tool") for turns in (1, 3, 5)]
    prompts = prompts_of(rows)
    keys = [SampleKey(0, row, sample) for row in range(len(rows)) for sample in range(2)]
    rollout = play(loop, models, kind, Direct(generator), prompts, keys)

    from transformers import AutoTokenizer
    stops = sorted({*STOPS, AutoTokenizer.from_pretrained(models / kind).eos_token_id, *generator_stops(models, kind)})
    expected = [played_by_hand(models, kind, rows[key.row][0], prompts.metadata[key.row], key, by_hand, stops)
                for key in keys]
    assert [episode.cause for episode in rollout.episodes] == [cause for _, cause in expected]
    assert [len(its) for its in rollout.sample_rows] == [len(its) for its, _ in expected]
    flat = [row for its, _ in expected for row in its]
    for i, (tokens, mask, logprobs) in enumerate(flat):
        assert rollout.row(i, "tokens").tolist() == tokens
        assert rollout.row(i, "response_mask").tolist() == mask
        assert rollout.row(i, "logprobs").tolist() == np.float32(logprobs).tolist()
        assert rollout.row(i, "versions").tolist() == [0 if sampled else -1 for sampled in mask]
    assert sum(len(episode.turns) > 2 for episode in rollout.episodes) >= 3, "too few episodes of several turns"
    assert (kind == "qwen3") == (len(flat) > len(keys)), "only qwen3 begins new segments"


def generator_stops(models, kind):
    """What ends a turn beside the configured tokens, as the model's files say."""
    from rlhf_ray.data.answers import stop_tokens
    from rlhf_ray.models.loading import load_tokenizer
    from rlhf_ray.models.stop_tokens import named_stop_tokens

    config = ModelConfig(path=str(models / kind))
    tokenizer = load_tokenizer(config)
    return stop_tokens(tokenizer, named_stop_tokens(tokenizer, config))


def test_learners_compute_what_transformers_computes_on_every_segment(loop, models, generator):
    rows = [("user", 3), ("tool", 4), ("user", 5)]
    keys = [SampleKey(0, row, sample) for row in range(len(rows)) for sample in range(3)]
    rollout = play(loop, models, "qwen3", Direct(generator), prompts_of(rows), keys)
    assert len(rollout) > len(keys)
    model = load_model(models / "qwen3")
    expected = reference_logprobs(model, rollout)
    sampled = rollout.response_mask
    np.testing.assert_allclose(rollout.logprobs[sampled], expected[sampled], atol=2e-4)
    scorer = ReferenceScorer(ModelConfig(path=str(models / "qwen3")), 4096, 1.0, CONTEXT)
    scorer.start()
    np.testing.assert_allclose(scorer.logprobs([rollout]).values[sampled], expected[sampled], atol=2e-5)


def test_all_samples_of_a_prompt_meet_one_world_and_other_prompts_others(loop, models, generator):
    keys = [SampleKey(epoch, row, sample) for epoch in range(2) for row in range(2) for sample in range(3)]
    rollout = play(loop, models, "gemma", Direct(generator), prompts_of([("user", 2)] * 2), keys)
    begun = {}
    for key, episode in zip(keys, rollout.episodes, strict=True):
        begun.setdefault((key.epoch, key.row), set()).add(episode.messages[0]["content"])
    assert all(len(texts) == 1 for texts in begun.values())
    assert len(set().union(*begun.values())) == 4
    firsts = [rollout.row(i, "tokens")[rollout.row(i, "response_mask")].tolist() for i in range(3)]
    assert firsts[0] != firsts[1] != firsts[2], "samples have seeds of their own"


def test_an_episode_does_not_depend_on_its_engine_process_or_neighbours(loop, models, generator):
    second = make_generator(models)  # the last test: with this engine, vLLM's state of the process ends
    loop.run_until_complete(second.start())
    rows = [("user", 4), ("tool", 5)]
    prompts = prompts_of(rows)
    keys = [SampleKey(2, row, sample) for row in range(len(rows)) for sample in range(4)]
    one = play(loop, models, "qwen2.5", Direct(generator), prompts, keys, processes=1)
    two = play(loop, models, "qwen2.5", Direct(second), prompts, keys[::-1], processes=3, concurrency=2)
    loop.run_until_complete(second.stop())
    again = two.select(two.rows_of(np.arange(len(keys))[::-1]))
    assert again.keys == one.keys and again.episodes == one.episodes
    for column in ("offsets", "tokens", "response_mask", "logprobs", "versions", "seeds"):
        assert getattr(again, column).tobytes() == getattr(one, column).tobytes(), column
