"""Keys of Apache Kafka's brokers that are accepted with a warning, and not stored.

This module and ``unused_keys.py``, which has the keys that tools may query, list all keys of Kafka
3.9, 4.3 and 4.4 that have no effect here. Source: ``AbstractKafkaConfig.CONFIG_DEF``.
"""

from __future__ import annotations

from collections.abc import Mapping

_TABLE = """
a controller of Fencepost is one node: there is no quorum that elects it
    controller.quorum.auto.join.enable controller.quorum.election.backoff.max.ms
    controller.quorum.election.timeout.ms
the controller writes each decision at once, and does not log the time that it took
    controller.performance.always.log.threshold.ms controller.performance.sample.period.ms
    controller.quorum.append.linger.ms
a start has no time limit
    server.max.startup.time.ms
unstable levels of features are not served
    unstable.feature.versions.enable
node.id is this broker's number: none is generated
    broker.id.generation.enable reserved.broker.max.id
the levels of features say what brokers write (`fencepost features`)
    eligible.leader.replicas.enable inter.broker.protocol.version
every record batch is written in the format of Kafka 3.0 and later
    log.message.format.version
records are converted for every consumer that needs an older format
    log.message.downconversion.enable
log.message.timestamp.before.max.ms and log.message.timestamp.after.max.ms bound a record's time
    log.message.timestamp.difference.max.ms
a commit of offsets waits for all replicas in sync
    offsets.commit.required.acks
there is one group coordinator, for both protocols
    group.coordinator.new.enable
metadata is not migrated from ZooKeeper
    zookeeper.metadata.migration.min.batch.size
the metadata is fetched in pieces of 1 MiB
    controller.quorum.fetch.max.bytes controller.quorum.fetch.snapshot.max.bytes
no listener waits for the others: all serve when the broker does
    early.start.listeners
the operating system sizes its buffers
    replica.socket.receive.buffer.bytes
the time limit of a connection to another node is fixed
    socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms
there is one data directory
    alter.log.dirs.replication.quota.window.num
    alter.log.dirs.replication.quota.window.size.seconds cordoned.log.dirs
    log.dir.failure.timeout.ms metadata.log.dir num.replica.alter.log.dirs.threads
a snapshot of the metadata is written when their log has outgrown the last one
    internal.metadata.delete.delay.millis internal.metadata.log.segment.bytes
    internal.metadata.max.batch.size.in.bytes metadata.log.max.record.bytes.between.snapshots
    metadata.log.max.snapshot.interval.ms metadata.log.segment.bytes
    metadata.log.segment.min.bytes metadata.log.segment.ms
    metadata.max.retention.bytes metadata.max.retention.ms
classes of Java are not loaded
    alter.config.policy.class.name alter.config.policy.kraft.compatibility.enable
    client.quota.callback.class config.providers
    create.topic.policy.class.name principal.builder.class security.providers
there is no JMX
    auto.include.jmx.reporter kafka.metrics.polling.interval.secs kafka.metrics.reporters
    metric.reporters metrics.num.samples metrics.recording.level metrics.sample.window.ms
the backlog has 1,024 places
    socket.listen.backlog.size
what waits is dropped when it is answered
    delete.records.purgatory.purge.interval.requests fetch.purgatory.purge.interval.requests
    producer.purgatory.purge.interval.requests share.fetch.purgatory.purge.interval.requests
one event loop serves all requests, and the number of threads beside it is fixed
    group.coordinator.background.threads
memory is taken as it is needed
    group.coordinator.cached.buffer.max.bytes log.cleaner.io.buffer.load.factor
a page of DescribeTopicPartitions has at most 2,000 partitions
    max.request.partition.size.limit
expressions are matched when topics change
    group.consumer.regex.refresh.interval.ms
records are kept on the disk: tiered storage is not served
    follower.fetch.last.tiered.offset.enable remote.fetch.max.wait.ms
    remote.list.offsets.request.timeout.ms
    remote.log.index.file.cache.total.size.bytes remote.log.index.file.cache.ttl.ms
    remote.log.manager.copier.thread.pool.size remote.log.manager.copy.max.bytes.per.second
    remote.log.manager.copy.quota.window.num remote.log.manager.copy.quota.window.size.seconds
    remote.log.manager.expiration.thread.pool.size remote.log.manager.fetch.max.bytes.per.second
    remote.log.manager.fetch.quota.window.num remote.log.manager.fetch.quota.window.size.seconds
    remote.log.manager.follower.thread.pool.size remote.log.manager.task.interval.ms
    remote.log.manager.task.retry.backoff.max.ms remote.log.manager.task.retry.backoff.ms
    remote.log.manager.task.retry.jitter remote.log.manager.thread.pool.size
    remote.log.metadata.custom.metadata.max.bytes remote.log.metadata.manager.class.name
    remote.log.metadata.manager.class.path remote.log.metadata.manager.impl.prefix
    remote.log.metadata.manager.listener.name remote.log.reader.max.pending.tasks
    remote.log.reader.threads remote.log.storage.manager.class.name
    remote.log.storage.manager.class.path remote.log.storage.manager.impl.prefix
    remote.log.storage.system.enable
share groups have one implementation, and share.version enables them
    group.share.dlq.manager.class.name group.share.enable
    group.share.max.groups group.share.persister.class.name
writes are complete when they are answered
    share.coordinator.append.linger.ms
memory is taken as it is needed
    share.coordinator.cached.buffer.max.bytes
logs are read segment by segment
    share.coordinator.load.buffer.size
coordinator records are small
    share.coordinator.state.topic.compression.codec
one event loop serves all requests, and the number of threads beside it is fixed
    share.coordinator.threads
streams groups are not served
    group.streams.topology.description.plugin.class
delegation tokens are not served
    delegation.token.expiry.check.interval.ms delegation.token.expiry.time.ms
    delegation.token.master.key delegation.token.max.lifetime.ms delegation.token.secret.key
this way of encryption or authentication is not served
    sasl.client.callback.handler.class sasl.kerberos.kinit.cmd
    sasl.kerberos.min.time.before.relogin sasl.kerberos.principal.to.local.rules
    sasl.kerberos.service.name sasl.kerberos.ticket.renew.jitter
    sasl.kerberos.ticket.renew.window.factor sasl.login.callback.handler.class sasl.login.class
    sasl.login.connect.timeout.ms sasl.login.read.timeout.ms sasl.login.refresh.buffer.seconds
    sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor
    sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms
    sasl.oauthbearer.assertion.algorithm sasl.oauthbearer.assertion.claim.aud
    sasl.oauthbearer.assertion.claim.exp.seconds sasl.oauthbearer.assertion.claim.iss
    sasl.oauthbearer.assertion.claim.jti.include sasl.oauthbearer.assertion.claim.nbf.seconds
    sasl.oauthbearer.assertion.claim.sub sasl.oauthbearer.assertion.file
    sasl.oauthbearer.assertion.private.key.file
    sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.template.file
    sasl.oauthbearer.client.credentials.client.id
    sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.jwt.retriever.class
    sasl.oauthbearer.jwt.validator.class sasl.oauthbearer.scope
    sasl.oauthbearer.token.endpoint.url sasl.server.callback.handler.class
    ssl.engine.factory.class ssl.keymanager.algorithm
    ssl.provider ssl.secure.random.implementation ssl.trustmanager.algorithm
"""


def _read(table: str) -> dict[str, str]:
    """Return the reason for each key; in the table a reason is followed by its keys, indented."""
    reasons, reason = {}, ""
    for line in table.strip().splitlines():
        if line.startswith(" "):
            reasons.update(dict.fromkeys(line.split(), reason))
        else:
            reason = line
    return reasons


IGNORED_KEYS: Mapping[str, str] = _read(_TABLE)
"""The reason why a key has no effect here, by key."""

IGNORED_PREFIXES: Mapping[str, str] = {
    "config.providers.": IGNORED_KEYS["config.providers"],
    "rlmm.config.": IGNORED_KEYS["remote.log.storage.system.enable"],
    "rsm.config.": IGNORED_KEYS["remote.log.storage.system.enable"],
}
"""The reason why a key for a plugin of Apache Kafka has no effect here, by prefix."""
