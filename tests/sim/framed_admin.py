"""Requests of operators, which an admin client sends to simulated brokers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.client.requests import NAMED, Partition, of_group, rows_of
from fencepost.cluster.image import TOPIC_RESOURCE
from fencepost.protocol.messages import RequestFactory
from tests.sim.framed import BACKOFF_MS, LOST, REQUEST_MS, FrameClient, Promises
from tests.sim.invariants import BrokenInvariantError

PREFERRED: Final = 0
UNCLEAN: Final = 1
"""Types of elections."""
LEFT_BEHIND: Final = "left-behind"
"""A group without members, which has offsets of topics that are deleted."""
NO_SETTINGS: Final[Mapping[str, str]] = {}
FETCHES: Final = 20
"""An offset of a deleted topic must be gone within this number of OffsetFetch requests."""


class Admin(FrameClient):
    """Sends the requests of operators."""

    _committed = 0

    async def live(self) -> None:
        """Do nothing: each request is a task of its own."""

    async def create(
        self, name: str, partitions: int, factor: int, settings: Mapping[str, str] = NO_SETTINGS
    ) -> None:
        """Create a topic, with retries until it exists."""

        def body(make: RequestFactory) -> Any:
            rows = [
                make.CreatableTopicConfig(name=key, value=value) for key, value in settings.items()
            ]
            topic = make.CreatableTopic(
                name=name, num_partitions=partitions, replication_factor=factor, configs=rows
            )
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        while True:
            answer = await self.ask("CreateTopics", entity=body)
            if answer is not LOST:
                code = answer.topics[0].error_code
                self.node.say(f"creates {name}: {code.name}")
                if code in {ErrorCode.none, ErrorCode.topic_already_exists}:
                    return
            await self.wait(BACKOFF_MS)

    async def delete(self, name: str) -> None:
        """Delete a topic."""

        def body(make: RequestFactory) -> Any:
            return make.message(
                topics=[make.DeleteTopicState(name=name)], topic_names=[name], timeout_ms=REQUEST_MS
            )

        answer = await self.ask("DeleteTopics", entity=body)
        if answer is not LOST:
            self.node.say(f"deletes {name}: {answer.responses[0].error_code.name}")

    async def recreate(self, name: str, partitions: int, factor: int, pause_ms: int) -> None:
        """Delete a topic, and create a topic with the same name."""
        await self.delete(name)
        await self.wait(pause_ms)
        await self.create(name, partitions, factor)

    async def commit_and_recreate(self, name: str, factor: int) -> None:
        """Check that an offset committed for a topic does not apply to a new topic of this name.

        The group has no members and commits rarely, so only the deletion removes the offset.
        """
        self._committed += 1
        offset = self._committed

        def commit(make: RequestFactory) -> Any:
            row = make.OffsetCommitRequestPartition(
                partition_index=0, committed_offset=offset, committed_metadata=""
            )
            return make.message(
                group_id=LEFT_BEHIND,
                generation_id_or_member_epoch=-1,
                member_id="",
                topics=[make.OffsetCommitRequestTopic(name=name, partitions=[row])],
            )

        def delete(make: RequestFactory) -> Any:
            return make.message(
                topics=[make.DeleteTopicState(name=name)], topic_names=[name], timeout_ms=REQUEST_MS
            )

        def fetch(make: RequestFactory) -> Any:
            named = make.OffsetFetchRequestTopics(name=name, partition_indexes=[0])
            group = make.OffsetFetchRequestGroup(group_id=LEFT_BEHIND, topics=[named])
            return make.message(groups=(group,), require_stable=True)

        answer = await self.ask(
            "OffsetCommit", at_most=NAMED["OffsetCommit"], to_group=LEFT_BEHIND, entity=commit
        )
        if answer is LOST or answer.topics[0].partitions[0].error_code:
            self.forget()
            return
        answer = await self.ask("DeleteTopics", entity=delete)
        if answer is LOST or answer.responses[0].error_code:
            return
        await self.create(name, 1, factor)
        told = None
        for _ in range(FETCHES):
            answer = await self.ask(
                "OffsetFetch", at_most=NAMED["OffsetFetch"], to_group=LEFT_BEHIND, entity=fetch
            )
            if answer is LOST or of_group(answer).error_code:
                self.forget()
            else:
                row = of_group(answer).topics[0].partitions[0]
                if not row.error_code:
                    told = row.committed_offset
                    if told != offset:
                        return
            await self.wait(BACKOFF_MS)
        if told == offset:
            raise BrokenInvariantError(f"{offset} was committed for the {name} that is deleted")

    async def grow(self, name: str, promises: Promises) -> None:
        """Give a topic one more partition."""
        count = promises.partitions + 1

        def body(make: RequestFactory) -> Any:
            topic = make.CreatePartitionsTopic(name=name, count=count, assignments=None)
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        while True:
            answer = await self.ask("CreatePartitions", entity=body)
            if answer is LOST:
                continue
            code = answer.results[0].error_code
            self.node.say(f"gives {name} {count} partitions: {code.name}")
            if code in {ErrorCode.none, ErrorCode.invalid_partitions}:
                promises.partitions = max(promises.partitions, count)
                return
            await self.wait(BACKOFF_MS)

    async def reassign(self, place: Partition, replicas: Sequence[int] | None) -> None:
        """Request a reassignment, or with None cancel it."""

        def body(make: RequestFactory) -> Any:
            row = make.ReassignablePartition(partition_index=place[1], replicas=replicas)
            topic = make.ReassignableTopic(name=place[0], partitions=[row])
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        answer = await self.ask("AlterPartitionReassignments", entity=body)
        if answer is not LOST:
            code = answer.error_code or answer.responses[0].partitions[0].error_code
            self.node.say(f"reassigns {place} to {replicas}: {code.name}")

    async def elect_leaders(self, kind: int) -> None:
        """Request an election, preferred or unclean, for all partitions."""

        def body(make: RequestFactory) -> Any:
            return make.message(election_type=kind, topic_partitions=None, timeout_ms=REQUEST_MS)

        answer = await self.ask("ElectLeaders", entity=body)
        if answer is not LOST:
            self.node.say(f"has leaders elected: {answer.error_code.name}")

    async def enable(self, feature: str) -> None:
        """Raise a feature to level 1, with retries until that succeeds."""

        def body(make: RequestFactory) -> Any:
            update = make.FeatureUpdateKey(feature=feature, max_version_level=1, upgrade_type=1)
            return make.message(feature_updates=[update], timeout_ms=REQUEST_MS)

        while True:
            answer = await self.ask("UpdateFeatures", entity=body)
            if answer is not LOST:
                self.node.say(f"enables {feature}: {answer.error_code.name}")
                if not answer.error_code:
                    return
            await self.wait(BACKOFF_MS)

    async def configure(self, name: str, kind: int = TOPIC_RESOURCE, **settings: str) -> bool:
        """Change settings of a topic, or of another resource; return whether that succeeded."""

        def body(make: RequestFactory) -> Any:
            rows = [
                make.AlterableConfig(name=key, config_operation=0, value=value)
                for key, value in settings.items()
            ]
            asked = make.AlterConfigsResource(resource_type=kind, resource_name=name, configs=rows)
            return make.message(resources=[asked], validate_only=False)

        answer = await self.ask("IncrementalAlterConfigs", entity=body)
        if answer is LOST:
            return False
        code = answer.responses[0].error_code
        self.node.say(f"sets {settings}: {code.name}")
        return not code

    async def delete_records(self, promises: Promises, place: Partition, offset: int) -> None:
        """Delete the records below ``offset``."""
        promises.deleted[place] = max(promises.deleted.get(place, 0), offset)

        def body(make: RequestFactory) -> Any:
            row = make.DeleteRecordsPartition(partition_index=place[1], offset=offset)
            topic = make.DeleteRecordsTopic(name=place[0], partitions=[row])
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        answer = await self.ask("DeleteRecords", to_leader=place, entity=body)
        if answer is not LOST:
            code = next(rows_of(answer))[1].error_code
            self.node.say(f"deletes records of {place} below {offset}: {code.name}")
