"""Packed attention against transformers' own, row by row; rows do not see each other."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlhf_ray.errors import ModelError
from rlhf_ray.models import attention
from rlhf_ray.models.attention import packed_attention
from rlhf_ray.models.cpu import short_rows
from rlhf_ray.models.packed_model import hidden_states
from rlhf_ray.models.packing import BLOCK_TOKENS, Packing

SHAPES = [(tied, kv_heads) for tied in (True, False) for kv_heads in (4, 2, 1)]


def rows_alone(model, tokens, packing):
    """[T, hidden]: each row through the whole model by itself."""
    return torch.cat([
        model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0]
        for row in tokens.split(packing.lengths.tolist())
    ])


def gradients(model, outputs):
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    logits = model.get_output_embeddings()(outputs)
    ((outputs * weights).sum() + logits.logsumexp(-1).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reference, gap", [("sdpa", 1e-6), ("eager", 2e-5)])  # eager's softmax is of float32
@pytest.mark.parametrize("tied, kv_heads", SHAPES)
def test_packed_rows_equal_rows_alone_forward_and_backward(
    causal_lm, tokens, packing, tied, kv_heads, reference, gap
):
    ours = causal_lm(tied, kv_heads, dtype=torch.float64)
    theirs = causal_lm(tied, kv_heads, attention=reference, dtype=torch.float64)
    packed, alone = hidden_states(ours, tokens, packing), rows_alone(theirs, tokens, packing)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=0)
    expected = gradients(theirs, alone)
    for name, grad in gradients(ours, packed).items():
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(grad, expected[name], atol=gap, rtol=gap, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("size", [1, 6, 10])
def test_blocks_change_nothing(causal_lm, tokens, packing, monkeypatch, size):
    whole, parts = causal_lm(kv_heads=2, dtype=torch.float64), causal_lm(kv_heads=2, dtype=torch.float64)
    expected = hidden_states(whole, tokens, packing)
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", size)
    split = Packing.of(packing.lengths)
    assert len(split.blocks) > 1
    torch.testing.assert_close(hidden_states(parts, tokens, split), expected, atol=1e-12, rtol=0)
    grads = gradients(whole, expected)
    for name, grad in gradients(parts, hidden_states(parts, tokens, split)).items():
        torch.testing.assert_close(grad, grads[name], atol=1e-9, rtol=1e-9)


def test_rows_of_one_length_equal_rows_alone(causal_lm, tokens):
    packing = Packing.of([6, 6, 6])
    ours, theirs = causal_lm(dtype=torch.float64), causal_lm(attention="sdpa", dtype=torch.float64)
    packed, alone = hidden_states(ours, tokens, packing), rows_alone(theirs, tokens, packing)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=0)
    expected = gradients(theirs, alone)
    for name, grad in gradients(ours, packed).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-6)


def test_packed_rows_equal_rows_alone_in_float32(causal_lm, tokens, packing):
    packed = hidden_states(causal_lm(), tokens, packing)
    torch.testing.assert_close(packed, rows_alone(causal_lm(attention="sdpa"), tokens, packing), atol=5e-6, rtol=0)


@pytest.mark.parametrize("row", range(4))
def test_changing_a_row_changes_no_other_by_a_bit(causal_lm, tokens, packing, row):
    model = causal_lm(kv_heads=2)
    with torch.no_grad():
        before = hidden_states(model, tokens, packing)
        changed = torch.where(packing.row_of_token == row, (tokens + 1) % 48, tokens)
        after = hidden_states(model, changed, packing)
    others = packing.row_of_token != row
    assert torch.equal(before[others], after[others])
    assert not torch.isclose(before[~others], after[~others]).all(-1).any()


def test_a_later_token_changes_no_earlier_one(causal_lm, tokens, packing):
    model = causal_lm()
    changed = tokens.clone()
    changed[10] = (changed[10] + 1) % 48  # position 4 of row 2, which lies at 6..14
    with torch.no_grad():
        same = (hidden_states(model, tokens, packing) == hidden_states(model, changed, packing)).all(-1)
    assert same.tolist() == [True] * 10 + [False] * 5 + [True] * 3


def test_without_a_packing_it_refuses():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"packing=Packing.*'sdpa' for padded batches"):
        packed_attention(torch.nn.Identity(), x, x, x, None)


def test_short_rows_by_products_equal_the_kernel_s(causal_lm, monkeypatch):
    lengths, found = [40, 33, 1, 20, 2], []
    tokens = torch.arange(sum(lengths)) % 47
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 50)
    for longest in (0, 40):
        monkeypatch.setattr(short_rows, "LONGEST", longest)
        model, packing = causal_lm(dtype=torch.float64), Packing.of(lengths)
        states = hidden_states(model, tokens, packing)
        assert bool(packing.head_grids) == (longest == 40)
        found.append([states.detach(), *gradients(model, states).values()])
    for kernel, products in zip(*found, strict=True):
        torch.testing.assert_close(products, kernel, atol=1e-10, rtol=1e-9)


class Gemma9Attention(torch.nn.Module):
    config = SimpleNamespace(model_type="gemma9")


def called_with(causal=True, mask=None, **arguments):
    x, module = torch.ones(1, 2, 6, 4), Gemma9Attention()
    module.is_causal = causal
    return packed_attention(module, x, x, x, mask, packing=Packing.of([4, 2]), **arguments)[0]


@pytest.mark.parametrize("arguments", [
    {"position_ids": torch.arange(6)[None], "use_cache": False, "output_attentions": False}, {"sliding_window": 4},
    {"softcap": None, "s_aux": None, "position_bias": None, "sliding_window": None, "encoder_hidden_states": None},
    {"is_causal": True},
])
def test_arguments_that_change_nothing_pass(arguments):
    assert torch.equal(called_with(**arguments), called_with())


@pytest.mark.parametrize(("arguments", "said"), [
    ({"position_bias": torch.zeros(2)}, r"position_bias \(a Tensor\)"), ({"new_thing": 1}, "new_thing=1"),
    ({"mask": torch.zeros(6, 6)}, r"attention_mask \(a Tensor\)"), ({"is_causal": False}, "is_causal=False"),
    ({"causal": False}, "attend to later ones"),
])
def test_arguments_that_change_what_attention_computes_are_refused_by_name(arguments, said):
    with pytest.raises(ModelError, match=rf"^Gemma9Attention of the family 'gemma9' .*{said}.*docs/models\.md"):
        called_with(**arguments)


KINDS = {
    "plain": {}, "window": {"sliding_window": 3}, "window of one": {"sliding_window": 1},
    "soft-cap": {"softcap": 0.7}, "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"softcap": 0.7, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 4, "scaling": 0.3},
}
WIDE = [9, 1, 4, 12, 3]


def by_definition(q, k, v, scaling=None, softcap=None, s_aux=None, sliding_window=None):
    """[heads, L, D] attention of one row, written out a head and a query at a time."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    for head in range(q.shape[0]):
        own = head * k.shape[0] // q.shape[0]
        rows = []
        for i in range(q.shape[1]):
            first = max(0, i + 1 - (sliding_window or i + 1))
            scores = k[own, first : i + 1] @ q[head, i] * (scaling or q.shape[-1] ** -0.5)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            mass = scores.exp() / (scores.exp().sum() + (s_aux[head].exp() if s_aux is not None else 0))
            rows.append(mass @ v[own, first : i + 1])
        out[head] = torch.stack(rows)
    return out


def drawn(heads, sizes, tokens):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, tokens, size, generator=generator, dtype=torch.float64, requires_grad=True)
            for n, size in zip(heads, sizes, strict=True)]


@pytest.mark.parametrize(("at_a_time", "operator"), [(2**26, False), (100, False), (2**26, True)])
@pytest.mark.parametrize(("kv_heads", "sizes"), [(4, (6, 6, 6)), (2, (6, 6, 5))])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_is_what_its_definition_says(kind, kv_heads, sizes, at_a_time, operator, monkeypatch):
    """Also as the operator that it is in compiled layers."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: operator)
    monkeypatch.setattr(attention, "LARGEST_SCORES", at_a_time)
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 12)
    inputs, packing = drawn((4, kv_heads, kv_heads), sizes, sum(WIDE)), Packing.of(WIDE)
    arguments = {name: value.double().requires_grad_() if name == "s_aux" else value
                 for name, value in KINDS[kind].items()}
    learned = [*inputs, *(value for value in arguments.values() if isinstance(value, torch.Tensor))]
    ours = packed_attention(torch.nn.Identity(), *inputs, None, packing=packing, **arguments)[0][0].transpose(0, 1)
    theirs = torch.cat([by_definition(*row, **arguments)
                        for row in zip(*(x[0].split(WIDE, 1) for x in inputs), strict=True)], 1)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), learned) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def operator_inputs(**others):
    """Arguments of the operator of compiled layers: five rows of 29 tokens."""
    q, k, v = (x.detach()[0].transpose(0, 1).float().requires_grad_() for x in drawn((4, 2, 2), (6, 6, 5), sum(WIDE)))
    values = {"sinks": None, "offsets": Packing.of(WIDE).offsets, "seed": None, "block_tokens": 12, "dropout": 0.0,
              "scale": None, "window": None, "softcap": None, **others}
    return q, k, v, *values.values()


@pytest.mark.parametrize("others", [{}, {"sinks": torch.zeros(4, requires_grad=True), "window": 4}])
def test_the_operator_is_what_compilers_expect(others):
    """Its schema, its shapes without values, and its gradients in graphs."""
    torch.library.opcheck(torch.ops.rlhf_ray.packed_attention.default, operator_inputs(**others))


def test_the_operator_s_dropout_follows_from_its_seed_and_is_the_same_in_the_backward_pass():
    def passed(seed):
        inputs = operator_inputs(dropout=0.5, seed=torch.tensor([seed]))
        out = torch.ops.rlhf_ray.packed_attention(*inputs)
        return out.detach(), torch.autograd.grad(out.sum(), inputs[2])[0]

    state = torch.get_rng_state()
    once, again, other = passed(3), passed(3), passed(4)
    assert torch.equal(torch.get_rng_state(), state), "the run's random numbers are its own"
    assert all(map(torch.equal, once, again)) and not torch.equal(once[0], other[0])
    # Outputs are sums of values by weights, whose gradients the weights are: the sum over tokens of both is the same.
    value = operator_inputs()[2].detach()
    torch.testing.assert_close((once[1] * value).sum(), once[0].sum(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped heads", "repeated heads, as torch 2.11 needs them"])
@pytest.mark.parametrize("window", [None, 3])
def test_the_variable_length_kernel_receives_rows_and_windows_as_it_documents(window, grouped):
    """torch documents a window as the numbers of keys before and after the query, -1 for all."""
    q, k, v = (x[0].transpose(0, 1) for x in drawn((4, 2, 2), (6, 6, 6), sum(WIDE) + 5))

    def documented(q, k, v, starts, starts_k, longest, longest_k, *, scale, window_size, enable_gqa):
        assert starts.dtype == torch.int32 and starts is starts_k and longest == longest_k == 12 and enable_gqa
        return older(q, k, v, starts, starts_k, longest, longest_k, scale=scale, window_size=window_size)

    def older(q, k, v, starts, starts_k, longest, longest_k, *, scale, window_size):
        assert grouped or q.shape == k.shape == v.shape
        before, after = window_size
        assert after == 0
        rows = [slice(int(a), int(b)) for a, b in pairwise(starts)]
        return torch.cat([by_definition(
            *(x[row].transpose(0, 1) for x in (q, k, v)), scale, sliding_window=None if before < 0 else before + 1,
        ).transpose(0, 1) for row in rows])

    kind, packing = attention.Kind(window=window, scale=0.4), Packing.of(WIDE)
    kernel = documented if grouped else attention.with_repeated_heads(older)
    found = attention.attend_variable_length(kernel, packing, q, k, v, kind)
    grids = packed_attention(torch.nn.Identity(), *(x.transpose(0, 1)[None] for x in (q, k, v)), None, packing=packing,
                             sliding_window=window, scaling=0.4)[0][0]
    torch.testing.assert_close(found, grids, atol=1e-9, rtol=1e-9)


def test_torch_has_the_variable_length_kernel():
    assert attention.variable_length_kernel() is not None


def test_under_autocast_queries_and_keys_are_in_its_precision_too(causal_lm, tokens, packing, monkeypatch):
    """Float32 weights make float32 rotations, and the kernel for rows of any length takes half precision only."""
    seen = []
    monkeypatch.setattr(attention, "variable_length_kernel", lambda: True)
    monkeypatch.setattr(attention, "_fits_kernel", lambda query, value, kind: seen.append((query.dtype, value.dtype)))
    model = causal_lm(kv_heads=2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        hidden_states(model, tokens, packing)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    seen.clear()
    with torch.no_grad():
        hidden_states(model, tokens, packing)
    assert set(seen) <= {(torch.float32, torch.float32)}
