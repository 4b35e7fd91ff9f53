"""A generator is brought up to date while learners are lost and replaced: stand-ins in virtual time."""

import asyncio

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import NoWeightsPlan, WeightsError, WorkerError
from rlhf_ray.records import PublicationSize, WeightsPlan
from rlhf_ray.workers.generator_scaling import Scaling
from tests.unit.coordinator.losses import PublishingHarness, lost
from tests.unit.coordinator.stand_ins import StandInGroup

BUCKETS = 40
"""Of a publication, each 0.1 s under way: a catch-up takes some seconds."""


class Learners(StandInGroup):
    """A policy that can be replaced; a new process has no plan. Buckets name the process that gathered them."""

    def __init__(self):
        super().__init__("policy", self.behave)
        self.process, self._planned, self.without_a_plan, self.broken = 1, 0, 0, 0

    def incarnation(self, rank):
        return self.process

    async def respawn(self):
        """As `WorkerGroup.respawn`: calls to the old process fail from now on, and the new one starts in a while."""
        self.process += 1
        await asyncio.sleep(5.0)

    async def behave(self, rank, method, *args):
        process = self.process
        if method == "plan_weights":
            self._planned = process
            return WeightsPlan(PublicationSize(BUCKETS, 300), PublicationSize(BUCKETS, 300))
        if self._planned != process:
            self.without_a_plan += 1
            raise NoWeightsPlan("no plan")
        if self.broken:
            self.broken -= 1
            raise WorkerError("policy/0 failed in weight_bucket: RuntimeError: Connection closed by peer", "policy")
        await asyncio.sleep(0.1)
        if process != self.process:
            raise lost(self, rank, method, "stale")
        return process, args[1]


class WithRestartedLearners(PublishingHarness):
    """Generators and learners that are lost; `mixed` are generators that confirmed buckets of two processes."""

    def __init__(self, late=0.0, **generators):
        """`late`: for how long a generator's buckets are on their way to it after they are gathered, in seconds."""
        super().__init__(**generators)
        self.policy, self._late = Learners(), late
        self.roles.by_section["policy"] = self.policy
        self.publication, self.received, self.mixed = {}, {}, []
        behave = self.group.behave

        async def generator(rank, method, *args):
            process = self.group.incarnations[rank]
            if method == "load_weights":
                await asyncio.sleep(self._late)
            if process != self.group.incarnations[rank]:
                return None
            if method == "begin_weights":
                self.publication[rank], self.received[rank], version = args[0], [], args[1]
                if version <= self.group.versions[rank] and not args[3]:
                    raise WeightsError(f"generator/{rank} refuses version {version}, which is not newer")
            if method == "load_weights":
                (gathered_by, index), publication = args
                if publication != self.publication[rank]:
                    raise WeightsError("of another publication")
                self.received[rank].append((gathered_by, index))
            answer = await behave(rank, method, *args)
            if method == "finish_weights":
                assert sorted(index for _, index in self.received[rank]) == list(range(BUCKETS))
                if len({gathered_by for gathered_by, _ in self.received[rank]}) > 1:
                    self.mixed.append(rank)
            return answer

        self.group.answer = generator

    async def replace_learners(self, version):
        """What a run does when one was lost; it goes on from `version`."""
        await self.sync.forget()
        await self.policy.respawn()
        async with self.sync.changing():
            await asyncio.sleep(1.0)  # the checkpoint is loaded
            await self.sync.publish(version, resend=True)

    async def catching_up(self, rank=0):
        """Wait until a generator that was lost has got some buckets of its catch-up."""
        self.group.doomed.append((rank, "generate"))
        asked = asyncio.create_task(self.ask_all(1))
        while not self.received.get(rank) or self.group.incarnations[rank] == 1:
            await asyncio.sleep(0.05)
        return asked


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("version", [0, 1, 2], ids="back to version {}".format)
def test_a_generator_in_the_middle_of_catching_up_begins_anew_with_the_new_learners(workers, version):
    it = WithRestartedLearners(workers=workers)

    async def run():
        await it.publish(1, 2)
        asked = await it.catching_up()
        await it.replace_learners(version)
        await asked
        await asyncio.sleep(20)
        await it.publish(version + 1)
        return await it.ask_all(workers)

    assert run_in_virtual_time(run()) == list(range(workers))
    assert it.group.versions == [version + 1] * workers
    assert it.group.incarnations[0] == 2, "it was not to blame"
    assert it.policy.without_a_plan == 0 and it.mixed == [] and it.health.down == {}


def test_when_learners_are_about_to_be_replaced_no_catch_up_makes_a_call_any_more():
    it = WithRestartedLearners(workers=1)

    async def run():
        await it.publish(1)
        asked = await it.catching_up()
        await it.sync.forget()
        calls = len(it.policy.log)
        await asyncio.sleep(30)
        assert len(it.policy.log) == calls and not asked.done()
        await it.replace_learners(1)
        return await asked

    assert run_in_virtual_time(run()) == [0]


def test_buckets_that_were_on_their_way_from_the_old_learners_do_not_come_between_those_of_the_new():
    """They are of the same version: the run went back to the step that it had just made."""
    it = WithRestartedLearners(workers=1, late=8.0)

    async def run():
        await it.publish(1)
        it.group.doomed.append((0, "generate"))
        asked = asyncio.create_task(it.ask_all(1))
        while it.group.incarnations[0] == 1 or it.policy.log[-1][0] != "weight_bucket":
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert it.received[0] == [], "gathered, and on their way"
        await it.replace_learners(1)
        return await asked

    assert run_in_virtual_time(run()) == [0]
    assert it.group.versions == [1] and it.group.incarnations == [2] and it.mixed == []


@pytest.mark.parametrize("version", [0, 1])
def test_a_generator_that_has_just_confirmed_a_version_that_no_longer_is_takes_an_earlier_one(version):
    it = WithRestartedLearners(workers=1)

    async def run():
        await it.publish(1, 2)
        asked = await it.catching_up()
        while it.group.log[-1][0] != "finish_weights":
            await asyncio.sleep(0.01)
        await it.replace_learners(version)
        assert it.group.versions == [2]
        return await asked

    assert run_in_virtual_time(run()) == [0] and it.group.versions == [version] and it.group.incarnations == [2]


def test_a_generator_that_joins_while_learners_are_replaced_has_the_weights_of_the_new_ones():
    it = WithRestartedLearners(workers=1)
    group = it.group

    async def add(timeout_s):
        group.workers += 1
        group.incarnations.append(2)
        group.versions.append(0)
        return 1

    group.add = add
    scaling = Scaling(ClusterConfig(), it.roles, it.sync, lambda _: None, lambda _: None, it.said.append)

    async def run():
        await it.publish(1, 2)
        adding = asyncio.create_task(scaling.asked({"generators": 2}))
        while not it.received.get(1):
            await asyncio.sleep(0.05)
        await it.replace_learners(1)
        await adding
        return await it.ask_all(2)

    assert run_in_virtual_time(run()) == [0, 1] and group.versions == [1, 1] and it.policy.without_a_plan == 0


@pytest.mark.parametrize("failure", ["broken", "unplanned"])
def test_a_learner_s_own_failure_is_not_the_generators_for_ever(failure):
    """One whose collective broke with another rank answers with an error of its own; one that started anew has no
    plan."""
    it = WithRestartedLearners(workers=1)

    async def run():
        await it.publish(1)
        asked = await it.catching_up()
        if failure == "broken":
            it.policy.broken = 3
            with pytest.raises(WorkerError, match="Connection closed by peer"):
                await asked
        else:
            it.policy.process += 1
        await it.ask_all(1)
        if failure == "unplanned":
            await asked
        return await it.ask_all(1)

    assert run_in_virtual_time(run()) == [0] and it.group.versions == [1] and it.group.incarnations == [2]


def test_a_generator_lost_again_while_it_catches_up_is_restarted_whatever_the_learners_do():
    it = WithRestartedLearners(workers=1)

    async def run():
        await it.publish(1)
        it.group.doomed.append((0, "load_weights"))
        it.group.doomed.append((0, "generate"))
        asked = asyncio.create_task(it.ask_all(1))
        await asyncio.sleep(1.7)
        await it.replace_learners(1)
        return await asked

    assert run_in_virtual_time(run()) == [0] and it.group.versions == [1]
    assert it.group.incarnations == [3] and it.health.down == {}
