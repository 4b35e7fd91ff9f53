"""`rlhf-ray export` of a checkpoint that real DeepSpeed ranks wrote has the bytes of the ranks' own export."""

import json

import pytest

from rlhf_ray.checkpoint.model_card import card_of, card_of_average
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.stages import PPOConfig, ProcessRewardConfig, RewardModelConfig, SFTConfig
from rlhf_ray.data.supervised_records import Pairs
from rlhf_ray.stages.export_checkpoint import export_checkpoint
from tests.cluster.learners.plain_torch import OPTIMIZER, STEPS, make_sequences, make_step_rows

pytestmark = pytest.mark.cluster
LORA = {"rank": 4, "alpha": 16}
SUPERVISED = {
    "sft": (SFTConfig, "SFTLearner", lambda: make_sequences(1)),
    "reward_model": (RewardModelConfig, "RewardModelLearner", lambda: Pairs(make_sequences(3), make_sequences(4))),
    "process_reward": (ProcessRewardConfig, "ProcessRewardLearner", lambda: make_step_rows(3, soft=False)),
}
NEW = {"architecture": {"hidden_size": 32, "layers": 1, "heads": 1}}
CUTS = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]


@pytest.fixture
def checkpoint(ranks, tmp_path):
    """checkpoint(config, learner class, arguments, update) -> the run's directory, with a checkpoint of what the ranks
    have trained, and the directory of their own export."""

    def write(config, cls, arguments, update):
        learner = config.policy if isinstance(config, PPOConfig) else config.learner
        role = {"PolicyLearner": "policy_learner", "ActorCriticLearner": "policy_learner", "SFTLearner": "sft_learner",
                "RewardModelLearner": "reward_model_learner", "ProcessRewardLearner": "process_reward_learner"}[cls]
        learners = ranks.make(learner.workers, cls, {"config": learner, "model": config.model, "seed": config.run.seed,
                                                     "total_steps": 100, **arguments})
        update(learners)
        run, own = tmp_path / "run", tmp_path / "own"
        store = CheckpointStore(run / "checkpoints", keep=1)
        new = store.begin(3)
        learners.save(new / role)
        store.commit(new, 3)
        (run / "config.yaml").write_text(as_yaml(config))
        card = card_of(config, 3, {})
        learners.do("export", str(own), card)
        if learner.lora:
            learners.do("export_adapter", str(own / "adapter"), card)
        if getattr(learner, "ema_decay", None):
            learners.do("export_average", str(own / "model_ema"), card_of_average(card, learner.ema_decay))
        if cls == "ActorCriticLearner":
            (own / "value_head").mkdir()
            learners.do("export_value_head", str(own / "value_head" / "value_head.safetensors"))
        return run, own

    return write


def contents(directory):
    """Every file's bytes, by its path; of a model card what follows the title, which is the directory's name. peft
    writes a set of layers in any order."""
    found = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    for file in [name for name in found if name.endswith("README.md")]:
        found[file] = found[file].partition(b"\n\nTrained by")[2]
    if adapter := found.get("adapter/adapter_config.json"):
        values = json.loads(adapter)
        found["adapter/adapter_config.json"] = {**values, "target_modules": sorted(values["target_modules"])}
    return found


def assert_exported_as(run, own, names):
    """The export has the bytes of the ranks' own, and `names` among its files."""
    said = []
    exported = export_checkpoint(run, say=said.append)
    assert exported.files["model"] == run / "export" / "step_3" and exported.step == 3
    assert set(exported.files) == names
    assert contents(exported.files["model"]) == contents(own)
    assert said == [f"step 3 of 100, from {run}/checkpoints/step_3"]


def ppo_config(files, workers, zero, **policy):
    critic = policy.pop("critic", {})
    return PPOConfig(model={"path": str(policy.pop("path", files.tied)), "dtype": policy.pop("dtype", "float32")},
                     rewards={"r": {"type": "number"}}, prompts={"path": "p"}, run={"seed": 5}, critic=critic,
                     algorithm={"epochs": 1, "mini_batches": 1},
                     policy={"workers": workers, "zero_stage": zero, "optimizer": OPTIMIZER, **policy})


def train_policy(experiences):
    return lambda learners: learners.do("update", 0, 0.0, *experiences)


def policy_arguments(config):
    return {"algorithm": config.algorithm, "temperature": 0.7}


@pytest.mark.parametrize(("world", "zero"), CUTS)
@pytest.mark.parametrize("kind", [pytest.param("whole", marks=pytest.mark.slow), "adapters"])
def test_a_policy(checkpoint, files, experiences, kind, world, zero):
    options = {"ema_decay": 0.9} if kind == "whole" else {"lora": LORA, "ema_decay": 0.9, "dtype": "bfloat16"}
    config = ppo_config(files, world, zero, **options)
    run, own = checkpoint(config, "PolicyLearner", policy_arguments(config), train_policy(experiences))
    assert_exported_as(run, own, {"model", "model_ema"} | ({"adapter"} if kind == "adapters" else set()))


@pytest.mark.parametrize(("world", "zero"), CUTS)
def test_a_policy_that_is_its_own_critic(checkpoint, files, experiences, world, zero):
    config = ppo_config(files, world, zero, path=files.policy, critic={"backbone": "policy"}, dtype="bfloat16")
    run, own = checkpoint(config, "ActorCriticLearner", policy_arguments(config),
                          lambda learners: learners.do("update_both", 0, 0.0, *experiences))
    assert_exported_as(run, own, {"model", "value_head"})


@pytest.mark.parametrize(("world", "zero"), CUTS)
@pytest.mark.parametrize(("stage", "start", "lora"), [
    pytest.param("sft", "new", LORA, marks=pytest.mark.slow), pytest.param("sft", "tied", None, marks=pytest.mark.slow),
    ("reward_model", "tied", LORA), pytest.param("reward_model", "reward", None, marks=pytest.mark.slow),
    pytest.param("process_reward", "policy", None, marks=pytest.mark.slow)])
def test_the_supervised_stages(checkpoint, files, stage, start, lora, world, zero):
    cls, learner, rows = SUPERVISED[stage]
    model = {**NEW, "tokenizer": str(files.tied)} if start == "new" else {"path": str(getattr(files, start))}
    steps = {"steps": STEPS} if stage == "process_reward" else {}
    config = cls(model=model, data={"path": "d"}, run={"seed": 5}, **steps,
                 learner={"workers": world, "zero_stage": zero, "optimizer": OPTIMIZER, "lora": lora})

    def train(learners):
        learners.do("take", rows(), rows())
        learners.do("update", 1)

    run, own = checkpoint(config, learner, {"batch_size": 9, **steps}, train)
    assert_exported_as(run, own, {"model", "adapter"} if lora else {"model"})
