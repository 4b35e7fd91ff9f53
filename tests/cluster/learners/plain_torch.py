"""The learners' updates in plain torch: one padded-free row after another, one AdamW, no engine; and what is learned
from."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.learner import LearnerConfig, OptimizerConfig, PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.data.stepwise_supervision import IGNORE, StepRows
from rlhf_ray.data.supervised_records import Sequences
from rlhf_ray.engine.training_state import TrainingState
from rlhf_ray.records import Experience, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.ppo_update import mini_batches

VOCAB, ROWS, SEED, TEMPERATURE = 64, 14, 3, 0.8
TOLERANCE = 5e-5
"""Of the size of the update: float32's accuracy, with room for the order of sums."""
LARGE, SMALL = 4096, 24
COEF = 0.4
"""Of the KL penalty in the loss."""
OPTIMIZER = OptimizerConfig(learning_rate=0.02, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1, grad_clip=0.8)
"""An eps of the gradients' size, so that AdamW does not turn rounding of tiny gradients into whole steps."""
UNCLIPPED = OptimizerConfig(learning_rate=0.1, betas=(0.9, 0.95), eps=0.1, grad_clip=0.0)
"""Neither clipping nor AdamW's normalisation hides a wrong factor before the gradient."""


def make_experiences(files):
    """Two experiences of random rows; one row has tokens inside its response that the policy did not sample."""
    rng = np.random.default_rng(8)
    prompts, responses = rng.integers(2, 9, ROWS), rng.integers(1, 13, ROWS)
    offsets = offsets_of(prompts + responses)
    mask = np.concatenate([np.repeat([False, True], [p, r]) for p, r in zip(prompts, responses, strict=True)])
    longest = int(responses.argmax())
    mask[offsets[longest + 1] - 5 : offsets[longest + 1] - 2] = False
    tokens = rng.integers(2, VOCAB, offsets[-1]).astype(np.int32)

    def column(scale):
        return np.where(mask, scale * rng.standard_normal(len(tokens)), 0).astype(np.float32)

    old = plain_logprobs(load_policy(files.tied), tokens, offsets, mask) + column(0.2)
    whole = Experience(offsets, tokens, mask, old, old, old + column(0.1), column(1), column(2), column(2),
                       [SampleKey(0, i, 0) for i in range(ROWS)])
    return [whole.select(range(6)), whole.select(range(6, ROWS))]


LEAVING_OUT = {"overlong_filter": True, "estimator": {"type": "gae", "whiten": False}}
"""With it rows without advantage and truncated ones are left out."""
TRUNCATED, WITHOUT_ADVANTAGE = 2, (1, 4)
"""Rows of each experience of `partly_useless`."""


def partly_useless(experiences):
    """The same with a truncated row in each, and some whose advantages are all 0."""
    changed = []
    for each in experiences:
        without = np.isin(np.repeat(np.arange(len(each)), each.lengths), WITHOUT_ADVANTAGE)
        reasons = ["length" if row == TRUNCATED else "stop" for row in range(len(each))]
        changed.append(replace(each, advantages=np.where(without, 0, each.advantages).astype(np.float32),
                               finish_reasons=reasons))
    return changed


def make_rollout(experience):
    """The rollout that an experience could have come from."""
    return Rollout(experience.offsets, experience.tokens, experience.response_mask, experience.behaviour_logprobs,
                   np.where(experience.response_mask, 0, -1).astype(np.int32), experience.keys,
                   np.arange(len(experience)), ["stop"] * len(experience))


def make_sequences(seed, rows=9):
    """Random rows whose first tokens carry no loss, except in one that is all loss."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 12, rows)
    mask = np.concatenate([np.arange(n) >= (0 if i == 2 else 2) for i, n in enumerate(lengths)])
    return Sequences(offsets_of(lengths), rng.integers(2, VOCAB, lengths.sum()).astype(np.int32), mask)


def load_policy(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def load_classifier(directory):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)


def row_logprobs(model, tokens, temperature):
    """[T] log-probability of each token of one row; 0 for the first. And the [T] entropies."""
    tokens = torch.from_numpy(tokens.astype(np.int64))
    every = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return (torch.cat([torch.zeros(1), every.gather(1, tokens[1:, None])[:, 0]]), torch.cat([torch.zeros(1), entropy]))


def row_values(model, tokens):
    """[T] head output one token earlier; 0 for the first token."""
    hidden = model.model(torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
    return torch.cat([torch.zeros(1), model.score(hidden)[:-1, 0]])


@torch.no_grad()
def plain_logprobs(model, tokens, offsets, mask, temperature=TEMPERATURE):
    rows = [row_logprobs(model, tokens[a:b], temperature)[0] for a, b in pairwise(offsets)]
    return np.where(mask, torch.cat(rows).numpy(), 0).astype(np.float32)


def policy_terms(model, batch, i, algorithm):
    """[n] losses of one row's response tokens: Schulman et al. 2017, eq. 7 and 9, weighted by Yao et al. 2025."""
    mask = torch.from_numpy(batch.row(i, "response_mask"))
    logprobs, entropy = row_logprobs(model, batch.row(i, "tokens"), TEMPERATURE)
    advantages = torch.from_numpy(batch.row(i, "advantages"))[mask]
    old, sampled = (torch.from_numpy(batch.row(i, f"{name}_logprobs"))[mask] for name in ("old", "behaviour"))
    ratio = (logprobs[mask] - old).exp()
    clipped = ratio.clamp(1 - algorithm.loss.clip_low, 1 + algorithm.loss.clip_high)
    truncated = algorithm.importance.tokens == "truncate"
    weight = (old - sampled).exp().clamp(max=algorithm.importance.cap) if truncated else 1.0
    surrogate = weight * torch.maximum(-advantages * ratio, -advantages * clipped)
    return surrogate - algorithm.entropy_coef * entropy[mask]


def penalised_terms(model, batch, i, algorithm):
    """[n] losses of one row with COEF times the KL penalty (Schulman 2020), spelled out."""
    mask = torch.from_numpy(batch.row(i, "response_mask"))
    logprobs, _ = row_logprobs(model, batch.row(i, "tokens"), TEMPERATURE)
    d = logprobs[mask] - torch.from_numpy(batch.row(i, "reference_logprobs"))[mask]
    kl = {"k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs()}[algorithm.kl.estimator]
    if algorithm.kl.unbiased:
        kl = kl * (logprobs[mask] - torch.from_numpy(batch.row(i, "old_logprobs"))[mask]).exp()
    return policy_terms(model, batch, i, algorithm) + COEF * kl


def critic_terms(model, batch, i, algorithm):
    """[n] losses of one row's response tokens: half the worse of plain and clipped squared error."""
    mask = torch.from_numpy(batch.row(i, "response_mask"))
    values = row_values(model, batch.row(i, "tokens"))[mask]
    old, returns = (torch.from_numpy(batch.row(i, name))[mask] for name in ("values", "returns"))
    near = old + (values - old).clamp(-algorithm.value_clip, algorithm.value_clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def plain_update(model, batch, terms, algorithm, config=OPTIMIZER, without=None, steps=None, kls=None):
    """The update of step 0; weights before and after, by name. Mini-batches of the row `without` are left out, and
    those after the first `steps`. The KL of a mini-batch from the policy before the update is added to `kls`."""
    before, optimizer = numbers(model), plain_adamw(model, config)
    for rows in list(mini_batches(len(batch), algorithm.epochs, algorithm.mini_batches, SEED, 0))[:steps]:
        if without in rows:
            continue
        mini = batch.select(rows)
        if kls is not None:
            kls.append(plain_kl(model, mini))
        losses = [terms(model, mini, i, algorithm) for i in range(len(mini))]
        plain_step(model, optimizer, torch.cat(losses).mean() if algorithm.aggregate == "token"
                   else torch.stack([row.mean() for row in losses]).mean(), config.grad_clip)
    return before, numbers(model)


@torch.no_grad()
def plain_kl(model, batch):
    """Mean over response tokens of exp(d) - 1 - d, where d is what a token's log-probability has gained."""
    new = plain_logprobs(model, batch.tokens, batch.offsets, batch.response_mask)
    gained = (new - batch.old_logprobs)[batch.response_mask].astype(np.float64)
    return float((np.exp(gained) - 1 - gained).mean())


def plain_adamw(model, config=OPTIMIZER):
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def plain_step(model, optimizer, loss, clip):
    optimizer.zero_grad()
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def numbers(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def algorithm(**changes):
    return AlgorithmConfig(epochs=2, mini_batches=2, **changes)


def policy_arguments(files, zero=1, budget=LARGE, checkpointing=False, algo=None, optimizer=OPTIMIZER):
    config = PolicyConfig(workers=1, zero_stage=zero, micro_batch_tokens=budget, gradient_checkpointing=checkpointing,
                          optimizer=optimizer)
    return {"config": config, "model": ModelConfig(path=str(files.tied)), "seed": SEED, "total_steps": 100,
            "algorithm": algo or algorithm(), "temperature": TEMPERATURE}


def critic_arguments(files, zero=1, budget=LARGE, checkpointing=False):
    config = CriticConfig(zero_stage=zero, micro_batch_tokens=budget, gradient_checkpointing=checkpointing,
                          optimizer=OPTIMIZER, init="reward")
    return {"config": config, "model": ModelConfig(path=str(files.reward)), "seed": SEED, "total_steps": 100,
            "algorithm": algorithm()}


def assert_same_update(expected, before, after):
    """The same change of every weight, to float32's accuracy; and a change that a tolerance cannot swallow."""
    first, last = expected
    size = max(float(np.abs(last[name] - first[name]).max()) for name in first)
    assert size > 0.01 and set(after) == set(last)
    for name in first:
        assert np.array_equal(before[name], first[name])
        assert np.abs(after[name] - last[name]).max() < TOLERANCE * size, name
        assert np.abs(last[name] - first[name]).max() > 20 * TOLERANCE * size, f"{name} hardly moves"


def states(directory):
    """Whole tensors of a learner's saved state, as bytes by kind and name, and how far it was."""
    saved = TrainingState(directory)
    names = sorted(saved.names())
    sizes = {name: sum(len(file.get_tensor(key)) for _, file, key in saved._spans["weights", name])
             for name in names}
    files = sorted(directory.glob("average_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
    parts = [torch.load(path, weights_only=True) for path in files]
    averages = {name: torch.cat([part[name] for part in parts])[: sizes[name]].numpy().tobytes() for name in names}
    notes = {name: value for name, value in saved.notes.items() if name != "world"}
    return notes, averages, {(kind, name): saved.whole(kind, name, sizes[name]).numpy().tobytes()
                             for kind in ("weights", "exp_avg", "exp_avg_sq") for name in names}


def poisoned(experiences):
    """The same with one advantage of the first row that is no number."""
    advantages = experiences[0].advantages.copy()
    advantages[experiences[0].response_mask.argmax()] = np.nan
    return [replace(experiences[0], advantages=advantages), experiences[1]]


def supervised_arguments(path, zero, budget):
    config = LearnerConfig(zero_stage=zero, micro_batch_tokens=budget, optimizer=OPTIMIZER)
    return {"config": config, "model": ModelConfig(path=str(path)), "seed": SEED, "total_steps": 100, "batch_size": 9}


def sft_loss(model, rows):
    """Mean over all tokens that carry loss; the first of a row is predicted from nothing."""
    terms = []
    for i in range(len(rows)):
        mask = torch.from_numpy(rows.row(i, "loss_mask").copy())
        mask[0] = False
        terms.append(-row_logprobs(model, rows.row(i, "tokens"), 1.0)[0][mask])
    return torch.cat(terms).mean()


def pair_loss(model, pairs):
    """-log sigmoid(chosen - rejected - margin) (Stiennon et al. 2020; Touvron et al. 2023)."""
    def score(side, i):
        tokens = torch.from_numpy(side.row(i, "tokens").astype(np.int64))
        return model.score(model.model(tokens[None]).last_hidden_state[0, -1])[0]

    distances = torch.stack([score(pairs.chosen, i) - score(pairs.rejected, i) for i in range(len(pairs))])
    return -logsigmoid(distances - (0 if pairs.margins is None else torch.from_numpy(pairs.margins))).mean()


def plain_supervised(model, data, loss):
    """Two updates on the whole data set; weights before and after."""
    before, optimizer = numbers(model), plain_adamw(model)
    for _ in range(2):
        plain_step(model, optimizer, loss(model, data), OPTIMIZER.grad_clip)
    return before, numbers(model)


STEPS = StepsConfig(placeholder="w9", good="w2", bad="w3", separator="w4")


def make_step_rows(seed, soft, rows=9):
    """Random rows of two to four steps, the placeholder after each; one step has no label."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 14, rows)
    placeholders = np.zeros(lengths.sum(), dtype=bool)
    for start, length in zip(offsets_of(lengths), lengths, strict=False):
        placeholders[start + rng.choice(np.arange(2, length), rng.integers(2, 5), replace=False)] = True
    tokens = np.where(placeholders, 9, rng.integers(10, VOCAB, len(placeholders))).astype(np.int32)
    labels = rng.random(len(tokens)).astype(np.float32) if soft else rng.integers(2, 4, len(tokens))
    labels = np.where(placeholders, labels, IGNORE).astype(labels.dtype)
    labels[np.flatnonzero(placeholders)[1]] = IGNORE
    return StepRows(offsets_of(lengths), tokens, placeholders, labels)


def step_loss(model, rows):
    """Cross-entropy of each label between the good and the bad token, at the placeholder (Lightman et al. 2023)."""
    terms = []
    for i in range(len(rows)):
        logits = model(torch.from_numpy(rows.row(i, "tokens").astype(np.int64))[None]).logits[0]
        for place in np.flatnonzero(rows.row(i, "placeholders")):
            label = rows.row(i, "labels")[place]
            if label != IGNORE:
                good = float(label) if rows.labels.dtype == np.float32 else float(label == 2)
                margin = logits[place, 2] - logits[place, 3]
                terms.append(-good * logsigmoid(margin) - (1 - good) * logsigmoid(-margin))
    return torch.stack(terms).mean()
