"""Token log-probabilities, entropies and scalar outputs of packed rows, against transformers' own."""

import weakref

import pytest
import torch

from rlhf_ray.algorithms.logprobs import SamplingMask
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.models import attention, packed_model
from rlhf_ray.models.attention import register
from rlhf_ray.models.cpu import linear
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.packed_model import (
    Chunks,
    PackedActorCritic,
    PackedLanguageModel,
    PackedScalarModel,
    last_token_scores,
    values_before_tokens,
)
from rlhf_ray.models.packing import Packing

VOCABULARY = 48
PREDICTED = torch.tensor([1, 2, 4, 7, 9, 14, 16, 17])  # rows start at 0, 5, 6 and 15


def reference_logits(model, tokens, packing):
    """[T, V] logits of each row alone; entry t is the distribution of what comes after token t."""
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in tokens.split(packing.lengths.tolist())])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_transformers_log_softmax(causal_lm, tokens, packing, tied, temperature):
    logits = reference_logits(causal_lm(tied, attention="sdpa"), tokens, packing)[PREDICTED - 1]
    expected = (logits / temperature).log_softmax(-1).gather(-1, tokens[PREDICTED, None])[:, 0]
    got, entropy = PackedLanguageModel(causal_lm(tied), temperature)(tokens, packing, PREDICTED)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert entropy is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_is_exact_at_the_temperature(causal_lm, tokens, packing, temperature):
    logits = reference_logits(causal_lm(attention="sdpa"), tokens, packing)[PREDICTED - 1]
    expected = torch.distributions.Categorical(logits=logits / temperature).entropy()
    _, entropy = PackedLanguageModel(causal_lm(), temperature)(tokens, packing, PREDICTED, entropy=True)
    torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=0)


def answers_and_gradients(model, tokens, packing, chunks, entropy, mask=None):
    logprobs, entropies = PackedLanguageModel(model, 0.7, chunks)(tokens, packing, PREDICTED, entropy, mask=mask)
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    total = (logprobs * weights).sum() + (entropies.square().sum() if entropy else 0)
    total.backward()
    return {"logprobs": logprobs.detach(), "entropies": entropies, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [Chunks(48), Chunks(3 * 48 + 1), Chunks(48, most_tokens=12)], ids=str)
def test_chunks_change_no_answer_and_no_gradient(causal_lm, tokens, packing, chunks, tied, entropy):
    whole = answers_and_gradients(causal_lm(tied, dtype=torch.float64), tokens, packing, Chunks(), entropy)
    pieces = answers_and_gradients(causal_lm(tied, dtype=torch.float64), tokens, packing, chunks, entropy)
    for name, expected in whole.items():
        torch.testing.assert_close(pieces[name], expected, atol=1e-12, rtol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


def backward_steps(*outputs):
    """The steps of a backward pass."""
    found, left = set(), [output.grad_fn for output in outputs]
    while left:
        step = left.pop()
        if step is not None and step not in found:
            found.add(step)
            left += [earlier for earlier, _ in step.next_functions]
    return found


def test_no_gradient_of_all_tokens_is_filled_with_zeros_in_the_backward_pass(causal_lm, tokens, packing, monkeypatch):
    monkeypatch.setattr(linear, "uses_onednn", lambda: False)  # as on GPUs
    monkeypatch.setattr(attention, "takes_short_rows", lambda *_: False)
    steps = backward_steps(*PackedLanguageModel(causal_lm())(tokens, packing, PREDICTED, entropy=True))
    indices = [step for step in steps if step.name() in ("SelectBackward0", "SliceBackward0")]
    assert {step._saved_dim for step in indices} == {3}  # halves of heads, by transformers' rotary embedding


def masks(tokens, only):
    """Half of the vocabulary is possible, the sampled tokens among it; for the last token all but one."""
    possible = torch.rand((len(PREDICTED), VOCABULARY), generator=torch.Generator().manual_seed(4)) < 0.5
    possible[-1, 1:] = True
    possible[torch.arange(len(PREDICTED)), tokens[PREDICTED]] = True
    places = (possible if only else ~possible).nonzero().tolist()
    rows = [[v for r, v in places if r == row] for row in range(len(PREDICTED))]
    listed = torch.tensor([row + [-1] * (VOCABULARY - len(row)) for row in rows])
    return possible, SamplingMask(listed, only)


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("chunks", [Chunks(), Chunks(3 * 48 + 1)], ids=str)
@pytest.mark.parametrize("module", [PackedLanguageModel, PackedActorCritic])
def test_masks_leave_only_possible_tokens(causal_lm, tokens, packing, chunks, only, module):
    possible, mask = masks(tokens, only)
    logits = reference_logits(causal_lm(attention="sdpa"), tokens, packing)[PREDICTED - 1] / 0.7
    distribution = torch.distributions.Categorical(logits=logits.masked_fill(~possible, -1e9))
    logprobs, entropies = module(causal_lm(), 0.7, chunks)(tokens, packing, PREDICTED, True, mask=mask)[:2]
    torch.testing.assert_close(logprobs, distribution.log_prob(tokens[PREDICTED]), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, distribution.entropy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("only", [True, False])
def test_chunks_change_no_gradient_of_masked_distributions(causal_lm, tokens, packing, only):
    _, mask = masks(tokens, only)
    whole, pieces = (answers_and_gradients(causal_lm(dtype=torch.float64), tokens, packing, chunks, True, mask)
                     for chunks in (Chunks(), Chunks(3 * 48 + 1)))
    for name, expected in whole.items():
        torch.testing.assert_close(pieces[name], expected, atol=1e-12, rtol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


def test_adapters_of_the_head_take_part_in_every_chunk(causal_lm, tokens, packing):
    found = []
    for chunks in (Chunks(), Chunks(3 * 48)):
        model = causal_lm(tied=False)
        torch.manual_seed(0)
        Adapters(model, LoRAConfig(rank=2, targets=["q_proj", "lm_head"]), "base")
        torch.nn.init.normal_(model.lm_head.lora_B.default.weight)
        found.append(answers_and_gradients(model.double(), tokens, packing, chunks, entropy=True))
    whole, pieces = found
    assert whole["lm_head.lora_A.default.weight"].abs().max() > 0.01
    for name in whole:
        if whole[name] is not None:
            torch.testing.assert_close(pieces[name], whole[name], atol=1e-12, rtol=1e-9)


def test_chunks_are_made_again_in_autocast_s_precision(causal_lm, tokens, packing):
    model, made = causal_lm(tied=False), []
    model.lm_head.register_forward_hook(lambda _, inputs, output: made.append(output.detach().clone()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = PackedLanguageModel(model, chunks=Chunks(3 * 48))(tokens, packing, PREDICTED)
    logprobs.sum().backward()
    assert [logits.dtype for logits in made] == [torch.bfloat16] * 6
    assert all(torch.equal(first, again) for first, again in zip(made[:3], made[:2:-1], strict=True))


@pytest.mark.parametrize("graph", [True, False])
def test_the_logits_of_one_chunk_exist_at_a_time_in_both_passes(causal_lm, tokens, packing, graph):
    model, made, sizes = causal_lm(), [], []

    def watch(_, inputs, output):
        assert not any(earlier() is not None for earlier in made)
        made.append(weakref.ref(output))
        sizes.append(inputs[0].shape[1])

    model.get_output_embeddings().register_forward_hook(watch)
    with torch.set_grad_enabled(graph):
        logprobs, _ = PackedLanguageModel(model, chunks=Chunks(3 * 48))(tokens, packing, PREDICTED)
    assert sizes == [3, 3, 2] and made[-1]() is None
    if graph:
        logprobs.sum().backward()
        assert sizes == [3, 3, 2, 2, 3, 3], "made again, from the last to the first"


def test_few_logits_are_made_once(causal_lm, tokens, packing):
    model, sizes = causal_lm(), []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[1]))
    PackedLanguageModel(model, chunks=Chunks(8 * 48))(tokens, packing, PREDICTED)[0].sum().backward()
    assert sizes == [8]


def test_ranks_that_must_match_cut_as_the_largest_pass_would():
    assert [Chunks(100).count(tokens, 10) for tokens in (0, 1, 10, 11, 25)] == [1, 1, 1, 2, 3]
    assert [Chunks(100, most_tokens=25).count(tokens, 10) for tokens in (0, 1, 25)] == [3, 3, 3]
    assert Chunks(5).count(4, 10) == 4, "one token at least"


def test_nothing_asked_gives_nothing(causal_lm, tokens, packing):
    logprobs, entropy = PackedLanguageModel(causal_lm())(tokens, packing, PREDICTED[:0], True)
    assert logprobs.shape == entropy.shape == (0,)


def test_gradients_are_transformers(causal_lm, tokens, packing):
    ours, theirs = causal_lm(dtype=torch.float64), causal_lm(attention="sdpa", dtype=torch.float64)
    PackedLanguageModel(ours, 0.7)(tokens, packing, PREDICTED)[0].sum().backward()
    logits = torch.cat([theirs(row[None]).logits[0] for row in tokens.split(packing.lengths.tolist())])
    logprobs = (logits[PREDICTED - 1] / 0.7).log_softmax(-1).gather(-1, tokens[PREDICTED, None])
    logprobs.sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def shapes_of_products(model, rows, predicted):
    """Tokens that each linear layer was given in a pass over so many rows of 9 tokens, with as many asked about."""
    seen = []
    hooks = [layer.register_forward_hook(lambda _, given, __: seen.append(given[0].numel() // given[0].shape[-1]))
             for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    tokens = torch.full((9 * rows,), 3)
    answers, _ = PackedLanguageModel(model)(tokens, Packing.of([9] * rows), torch.arange(1, 1 + predicted))
    for hook in hooks:
        hook.remove()
    assert len(answers) == predicted
    return seen


def test_passes_of_nearly_as_many_tokens_have_the_same_shapes(causal_lm, monkeypatch):
    monkeypatch.setattr(linear, "uses_onednn", lambda: True)
    model = causal_lm()
    assert shapes_of_products(model, 120, 601) == shapes_of_products(model, 119, 607)
    assert set(shapes_of_products(model, 120, 601)) == {1088, 608}


def test_filling_up_changes_no_answer_and_no_gradient(causal_lm, monkeypatch):
    rows, answers = Packing.of([33, 20, 13]), []
    tokens, predicted = torch.arange(66) % 47, torch.arange(40, 66)
    for filler in (lambda tokens: 0, lambda tokens: 7):
        monkeypatch.setattr(packed_model, "filler_of", filler)
        model = causal_lm(dtype=torch.float64)
        logprobs, _ = PackedLanguageModel(model)(tokens, rows, predicted)
        logprobs.square().sum().backward()
        answers.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    for plain, filled in zip(*answers, strict=True):
        torch.testing.assert_close(filled, plain, atol=1e-12, rtol=1e-9)


@pytest.fixture
def classifier():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    model = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, num_labels=1, pad_token_id=0,
    )).eval()
    model.set_attn_implementation(register())
    return model


@torch.no_grad()
def test_scalar_outputs_are_transformers_scores_of_each_row(classifier, tokens, packing):
    outputs = PackedScalarModel(classifier)(tokens, packing)
    assert outputs.shape == tokens.shape
    classifier.set_attn_implementation("sdpa")
    filled = tokens.clamp(min=2)  # transformers looks for padding, which is 0, to find a row's end
    expected = [classifier(row[None]).logits.item() for row in filled.split(packing.lengths.tolist())]
    classifier.set_attn_implementation(register())
    scores = last_token_scores(PackedScalarModel(classifier)(filled, packing), packing)
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-6, rtol=0)


def test_dropout_before_the_head_acts_in_training_only(classifier, tokens, packing):
    plain, dropping = PackedScalarModel(classifier), PackedScalarModel(classifier, dropout=0.5)
    torch.manual_seed(3)
    trained = dropping.train()(tokens, packing)
    kept = torch.nn.functional.dropout(torch.ones(len(tokens), 16), 0.5)  # other random numbers
    assert (trained - plain(tokens, packing)).abs().min() > 0 and kept.unique().tolist() == [0, 2]
    torch.manual_seed(3)
    assert torch.equal(dropping(tokens, packing), trained), "the same state of the random numbers, the same dropout"
    assert torch.equal(dropping.eval()(tokens, packing), plain(tokens, packing))
    assert [name for name, _ in dropping.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_last_token_scores_by_hand():
    assert last_token_scores(torch.arange(6.0), Packing.of([2, 3, 1])).tolist() == [1, 4, 5]


def test_a_value_is_of_the_state_before_its_token():
    assert values_before_tokens(torch.tensor([10.0, 11.0, 12.0, 13.0]), torch.tensor([1, 3])).tolist() == [10, 12]


@torch.no_grad()
def test_a_value_does_not_know_its_token(classifier, tokens, packing):
    model, changed = PackedScalarModel(classifier), tokens.clone()
    changed[9] = (changed[9] + 1) % 48
    before, after = (values_before_tokens(model(t, packing), torch.tensor([9, 10])) for t in (tokens, changed))
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_scalar_heads_have_more_digits_than_bfloat16(classifier, half):
    """A grid of 0.125 at 20, where values and scores may lie, would be as coarse as their differences."""
    tokens, packing = torch.arange(2, 34), Packing.of([16, 16])
    if half == "weights":
        classifier = classifier.bfloat16()
    model = PackedScalarModel(classifier)
    torch.nn.init.normal_(classifier.score.weight, std=4.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"), torch.no_grad():
        outputs = model(tokens, packing)
    assert outputs.dtype is torch.float32
    assert (outputs != outputs.bfloat16().float()).float().mean() > 0.9
