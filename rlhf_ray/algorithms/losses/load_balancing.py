"""The auxiliary loss that keeps a mixture's router from sending all tokens to few experts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """E sum_i f_i P_i over E experts: f_i is how many of the `top_k` choices of a token fall on expert i, on average,
    and P_i its mean probability (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, there with one choice).

    Averages are over the tokens of all layers together, as in transformers (`load_balancing_loss_func`), which also
    takes a mask for padding; here callers leave padding out. `top_k` is the minimum, for even routing. Gradients flow
    through P_i only.

    Args:
        router_logits: [T, E] for each layer.
        top_k: experts that each token is sent to.

    Returns:
        scalar, float32.
    """
    probabilities = torch.cat([logits.float().softmax(-1) for logits in router_logits])
    chosen = probabilities.detach().topk(top_k, dim=-1).indices
    share = chosen.flatten().bincount(minlength=probabilities.shape[1]) / len(probabilities)
    return probabilities.shape[1] * (share * probabilities.mean(0)).sum()
