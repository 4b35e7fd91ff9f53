"""Causal attention over packed rows, as an attention implementation of transformers.

Rows must not attend to each other. On GPUs torch's variable-length kernel computes this in half precision. Otherwise,
instead of a `[T, T]` block-diagonal mask, whose cost grows with the square of the whole micro-batch, queries, keys and
values are laid out as `[N, L]` grids and gathered back. This costs copies of all four, and attention over N · L² pairs
of positions instead of the rows' own pairs. The difference is small because micro-batches hold rows in order of length
and each grid holds only a few adjacent rows (`Packing.blocks`). All other layers run on real tokens only.

Each layer of a model may have another kind of attention, which transformers' families pass with every call: a sliding
window (`sliding_window`), a soft-cap of scores (`softcap`), sinks (`s_aux`).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rlhf_ray.algorithms.masking import wide
from rlhf_ray.errors import ModelError
from rlhf_ray.internals.torch import autograd_in_operator, constant_when_compiled
from rlhf_ray.models.cpu.short_rows import HeadGrids, ShortRowAttention, takes_short_rows
from rlhf_ray.models.packing import Packing, without_filler

NAME = "rlhf_ray_packed"
NEUTRAL = {
    "position_ids": "rotary embeddings are applied before attention is called",
    "use_cache": "passes over packed rows keep no keys and values",
    "output_attentions": "no pass here requests attention weights",
}
"""Further arguments that transformers' families pass to attention, and why they have no effect. Other arguments must be
None: `position_bias` is added to scores, `encoder_hidden_states` belong to another text."""
LARGEST_SCORES = 2**26
"""Scores of one grid that exist at a time where they are computed explicitly, in elements: 256 MiB of float32."""


@dataclass(frozen=True)
class Kind:
    """What one layer's attention computes beyond softmax(Q K' scale) V over a row's earlier tokens."""

    dropout: float = 0.0
    """Probability of dropping an attention weight."""
    scale: float | None = None
    """Factor of the scores; None for 1/sqrt(D)."""
    window: int | None = None
    """Number of last tokens that a token attends to, itself included; None for all."""
    softcap: float | None = None
    """Scores s become c tanh(s / c) (Gemma Team 2024, section 2)."""
    sinks: Tensor | None = None
    """[heads] additional scores in the softmax that have no value (OpenAI 2025, GPT-OSS, section 2.2)."""

    @property
    def has_own_scores(self) -> bool:
        """Whether no kernel computes this kind."""
        return self.softcap is not None or self.sinks is not None


class _Scatter(torch.autograd.Function):
    """Copy packed rows to a zero grid. The backward pass is a plain copy too; autograd's own would accumulate."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor, size: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        return flat.new_zeros((size, *flat.shape[1:])).index_copy_(0, index, flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """Copy packed rows back from a grid; every cell is read at most once."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.size = grid.shape[0]
        return grid.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, ctx.saved_tensors[0], grad), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, T, D]` queries over packed rows; returns `[1, T, heads, D]` as transformers expects.

    Tokens after the last row are filler and get zeros.

    Raises:
        ValueError: there is no `packing`, which only our own forward passes supply.
        ModelError: the model needs another kind of attention; names the family and the argument.
    """
    if packing is None:
        raise ValueError(f"attention {NAME!r} needs packing=Packing(...), which {_family(module)} did not receive "
                         "or does not pass on; use 'sdpa' for padded batches")
    _refuse_other_kinds(module, {"attention_mask": attention_mask, **others})
    kind = Kind(dropout, scaling, sliding_window, softcap, s_aux)
    q, k, v = (_in_autocast(x.squeeze(0).transpose(0, 1)) for x in (query, key, value))
    kernel = variable_length_kernel()
    if kernel is not None and _fits_kernel(q, v, kind):
        out = attend_variable_length(kernel, packing, q, k, v, kind)
    elif torch.compiler.is_compiling():
        out = _as_operator(packing, q, k, v, kind)
    else:
        out = _attend_otherwise(packing, q, k, v, kind)
    return out[None], None


def _attend_otherwise(packing: Packing, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
    """[T, heads, D] outputs of `[T, heads, D]` queries, keys and values where the kernel for rows of any length cannot
    compute them."""
    plain = not kind.has_own_scores and (kind.window is None or packing.longest <= kind.window)
    if plain and query.shape[-1] == value.shape[-1] and takes_short_rows(query, key, packing, kind.dropout):
        scale = query.shape[-1] ** -0.5 if kind.scale is None else kind.scale
        out: Tensor = ShortRowAttention.apply(query, key, value, HeadGrids.of(packing, query.shape[1]), scale)
        return out
    return attend_in_grids(packing, query, key, value, kind)


def _in_autocast(x: Tensor) -> Tensor:
    """In the precision of autocast, where it is on, as for torch's own attention. Where weights are float32, so are the
    rotations of queries and keys, and the kernel for rows of any length takes half precision only."""
    kind = x.device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


@constant_when_compiled
def _has_autocast(kind: str) -> bool:
    """Whether a type of device has autocast. What a compiled layer asks of the device must not be part of its graph."""
    return torch.amp.is_autocast_available(kind)


def _with_filler(outputs: list[Tensor], filler: int) -> Tensor:
    """The outputs one after the other, then zeros."""
    if filler:
        outputs = [*outputs, outputs[0].new_zeros(filler, *outputs[0].shape[1:])]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _refuse_other_kinds(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    """Reject arguments and modules that make attention something else than `Kind` describes."""
    unsupported = [name for name, value in others.items()
                   if value is not None and name not in NEUTRAL and not (name == "is_causal" and value)]
    if unsupported:
        name, value = unsupported[0], others[unsupported[0]]
        what = f"{name}={value}" if isinstance(value, int | float | str) else f"{name} (a {type(value).__name__})"
        raise ModelError(f"{_family(module)} calls attention with {what}, which packed attention does not compute; "
                         "use a model without it (see docs/models.md)")
    if getattr(module, "is_causal", True) is False:
        raise ModelError(f"{_family(module)} lets tokens attend to later ones (is_causal=False), which packed "
                         "attention does not; use a causal model (see docs/models.md)")


def _family(module: torch.nn.Module) -> str:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ + (f" of the family {kind!r}" if kind else "")


def variable_length_kernel() -> Callable[..., Tensor] | None:
    """`torch.nn.attention.varlen.varlen_attn`; None where torch has none that takes windows (before 2.11)."""
    if not (_kernel_takes("scale") and _kernel_takes("window_size")):
        return None
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if _kernel_takes("enable_gqa") else with_repeated_heads(varlen_attn)


@constant_when_compiled
def _kernel_takes(argument: str) -> bool:
    """Whether `varlen_attn` exists and has this argument."""
    return argument in _arguments_of_kernel()


@cache
def _arguments_of_kernel() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def with_repeated_heads(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel that takes `enable_gqa`, from one that does not (torch 2.11): each head of keys and values is repeated
    for the heads of queries that share it."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *rows: Any, enable_gqa: bool, **others: Any) -> Tensor:
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return kernel(query, key, value, *rows, **others)

    return attend


def _fits_kernel(query: Tensor, value: Tensor, kind: Kind) -> bool:
    """Whether FlashAttention 2, which `varlen_attn` calls, computes this: half precision on an Ampere GPU or later,
    heads of one size up to 256, neither dropout nor own scores."""
    size = query.shape[-1]
    return (query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not kind.dropout
            and not kind.has_own_scores and size == value.shape[-1] and size <= 256 and size % 8 == 0
            and _is_ampere(query.device))


@constant_when_compiled
def _is_ampere(device: torch.device) -> bool:
    """Whether a GPU is of the generation Ampere or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend_variable_length(
    kernel: Callable[..., Tensor], packing: Packing, query: Tensor, key: Tensor, value: Tensor, kind: Kind
) -> Tensor:
    """[T, heads, D] outputs of `[T, heads, D]` queries, keys and values by a kernel like `varlen_attn`, whose windows
    count the tokens before the query."""
    before = -1 if kind.window is None else kind.window - 1
    filler = len(query) - packing.tokens
    q, k, v = (without_filler(x, filler) for x in (query, key, value))
    out = kernel(q, k, v, packing.boundaries, packing.boundaries, packing.longest, packing.longest,
                 scale=kind.scale, window_size=(before, 0), enable_gqa=q.shape[1] != k.shape[1])
    return _with_filler([out], filler)


def attend_in_grids(packing: Packing, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
    """[T, heads, D] outputs of `[T, heads, D]` queries, keys and values, a grid for each block of rows."""
    filler = len(query) - packing.tokens
    parts = [x.split([*(block.tokens for block in packing.blocks), filler]) for x in (query, key, value)]
    return _with_filler([_attend(block, q, k, v, kind) for block, q, k, v in zip(packing.blocks, *parts, strict=False)],
                        filler)


def _attend(packing: Packing, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
    """[T, heads, D] outputs of `[T, heads, D]` queries, keys and values, with all rows in one grid."""
    size, length = packing.rows * packing.longest, packing.longest
    q, k, v = (
        (x if packing.is_grid else _Scatter.apply(x, packing.grid_index, size))
        .reshape(packing.rows, length, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    if kind.has_own_scores:
        out = _attend_by_scores(q, k, v, kind)
    else:
        windowed = kind.window is not None and kind.window < length
        if q.is_cuda and (windowed or q.dtype is torch.float32) and q.shape[1] != k.shape[1]:
            # Only the kernel that makes all scores takes groups of heads with a mask, or in float32, there.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=_visible(0, length, 0, kind.window, q.device) if windowed else None,
            dropout_p=kind.dropout, is_causal=not windowed, scale=kind.scale, enable_gqa=q.shape[1] != k.shape[1])
    flat = out.transpose(1, 2).reshape(size, *out.shape[1::2])
    return flat if packing.is_grid else _Gather.apply(flat, packing.grid_index)


def _visible(first: int, end: int, first_key: int, window: int | None, device: torch.device) -> Tensor:
    """[end - first, end - first_key] whether the queries at positions from `first` attend to the keys from
    `first_key`."""
    query = torch.arange(first, end, device=device)[:, None]
    key = torch.arange(first_key, end, device=device)
    causal = key <= query
    return causal if window is None else causal & (key > query - window)


def _attend_by_scores(query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
    """[N, heads, L, D] outputs with explicit scores. Where all of them would be too large, only those of some queries
    exist at a time, and the backward pass computes them again."""
    rows, heads, length, _ = query.shape
    step = max(1, LARGEST_SCORES // (rows * heads * length))
    outputs = []
    for first in range(0, length, step):
        end = min(first + step, length)
        start = 0 if kind.window is None else max(0, first - kind.window + 1)
        visible = _visible(first, end, start, kind.window, query.device)
        arguments = (query[:, :, first:end], key[:, :, start:end], value[:, :, start:end], visible, kind)
        outputs.append(_weighted_values(*arguments) if step >= length
                       else checkpoint(_weighted_values, *arguments, use_reentrant=False))
    return torch.cat(outputs, 2)


def _weighted_values(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, kind: Kind) -> Tensor:
    """[N, heads, l, D] outputs of l queries over s keys; softmax in float32, as transformers' own."""
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    scale = size ** -0.5 if kind.scale is None else kind.scale
    scores = (query.reshape(rows, -1, groups * length, size) @ key.mT).view(rows, heads, length, -1) * scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = wide(scores).masked_fill(~visible, -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(rows, heads, length, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = drop(weights, kind.dropout).to(value.dtype)
    return (weights.view(rows, -1, groups * length, weights.shape[-1]) @ value).view(rows, heads, length, -1)


def _as_operator(packing: Packing, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
    """`_attend_otherwise` as one operator of a compiled layer, whose graph then depends neither on how rows are divided
    into grids nor on which kernel takes them. Its backward pass computes the attention again."""
    seed = torch.randint(2**62, (1,)) if kind.dropout else None
    out: Tensor = torch.ops.rlhf_ray.packed_attention(
        query, key, value, kind.sinks, packing.offsets, seed, packing.block_tokens, kind.dropout, kind.scale,
        kind.window, kind.softcap)
    return out


@torch.library.custom_op("rlhf_ray::packed_attention", mutates_args=())
def _operator(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, offsets: Tensor, seed: Tensor | None,
    block_tokens: int | None, dropout: float, scale: float | None, window: int | None, softcap: float | None,
) -> Tensor:
    kind = Kind(dropout, scale, window, softcap, sinks)
    with _seeded(seed, query.device):
        return _attend_otherwise(_packing_of(offsets, query.device, block_tokens), query, key, value, kind).contiguous()


@torch.library.custom_op("rlhf_ray::packed_attention_backward", mutates_args=())
def _operator_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, offsets: Tensor, seed: Tensor | None,
    block_tokens: int | None, dropout: float, scale: float | None, window: int | None, softcap: float | None,
) -> list[Tensor]:
    """Gradients of queries, keys, values and, where there are any, sinks."""
    kept = [x.detach() for x in (query, key, value, sinks) if x is not None]
    with _seeded(seed, query.device), autograd_in_operator():
        leaves = [x.requires_grad_() for x in kept]
        kind = Kind(dropout, scale, window, softcap, leaves[3] if sinks is not None else None)
        packing = _packing_of(offsets, query.device, block_tokens)
        out = _attend_otherwise(packing, leaves[0], leaves[1], leaves[2], kind)
        return [x.contiguous() for x in torch.autograd.grad(out, leaves, grad)]


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@_operator_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (query, key, value, sinks) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.others = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, *sinks = torch.ops.rlhf_ray.packed_attention_backward(grad, *ctx.saved_tensors, *ctx.others)
    return query, key, value, sinks[0] if sinks else None, *(7 * (None,))


_operator.register_autograd(_differentiate, setup_context=_keep)
_LAST: list[Packing] = []
"""The packing of the last call of the operator: all layers of a pass, and its backward pass, have the same."""


def _packing_of(offsets: Tensor, device: torch.device, block_tokens: int | None) -> Packing:
    """The packing of these rows, with what it has computed in earlier calls."""
    if not (_LAST and _LAST[0].device == device and _LAST[0].block_tokens == block_tokens
            and torch.equal(_LAST[0].offsets, offsets)):
        _LAST[:] = [Packing(offsets.diff(), device, block_tokens)]
    return _LAST[0]


@contextmanager
def _seeded(seed: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside, random numbers follow from the seed if there is one."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def register() -> str:
    """Register the implementation with transformers; returns its name. Registering again has no effect."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME
