"""A worker group whose actors are no processes, for what a group does without Ray."""

from types import SimpleNamespace

from rlhf_ray.cluster.resource_pools import Seat
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.workers import worker_group


def local_group(monkeypatch, remote=lambda *_: [], workers=1, role="reward_scorer", call_timeout_s=0.02):
    """A `WorkerGroup` of a pool that has room for all; `remote(spec, *references)` answers each call with its results
    and its timing."""
    timed_call = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=remote))
    actor = SimpleNamespace(remote=lambda **_: SimpleNamespace(timed_call=timed_call))
    monkeypatch.setattr(worker_group, "actor_class", lambda cls: SimpleNamespace(options=lambda **_: actor))
    monkeypatch.setattr(worker_group, "ray", SimpleNamespace(kill=lambda _: None, ObjectRef=worker_group.ray.ObjectRef))

    async def leave_lost_nodes(*_):
        """No node is lost."""

    pools = SimpleNamespace(has_room=lambda _: True, leave=lambda *_: None, leave_lost_nodes=leave_lost_nodes,
                            seat=lambda _, rank, __: Seat(*[object()] * len(Seat._fields)))
    return worker_group.WorkerGroup(role, object, PlacementConfig(workers=workers), pools, lambda rank: {}, {},
                                    call_timeout_s)
