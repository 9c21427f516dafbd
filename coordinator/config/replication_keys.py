"""Keys of replication between brokers, with Kafka's names and defaults.

Source: ``ReplicationConfigs``, ``ReplicationQuotaManagerConfig``, ``BrokerSecurityConfigs``,
``QuotaConfig``.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import read_keys

_BROKER = """
num.replica.fetchers INT 1 low=1 dynamic
    Connections to each leader over which its partitions are fetched.
replica.fetch.max.bytes INT 1048576 unit=bytes low=0
    The most that a replica asks for of one partition; a first batch comes whole.
replica.fetch.response.max.bytes INT 10485760 unit=bytes low=0
    The most that it asks for in one request.
replica.fetch.min.bytes INT 1 unit=bytes low=0
    A leader waits until it has so much to send.
replica.fetch.wait.max.ms INT 500 unit=ms
    But no longer than this; it has to be less than replica.lag.time.max.ms.
replica.fetch.backoff.ms INT 1000 unit=ms low=0
    The pause of a partition whose fetch has failed.
replica.socket.timeout.ms INT 30000 unit=ms
    How long a leader may take to answer; not less than replica.fetch.wait.max.ms.
leader.replication.throttled.rate LONG 9223372036854775807 unit=bytes/s low=0 dynamic
    The most that throttled replicas outside of the ISR are sent.
follower.replication.throttled.rate LONG 9223372036854775807 unit=bytes/s low=0 dynamic
    The most that throttled replicas that are not in sync fetch.
replication.quota.window.num INT 11 low=1
    Samples that the rate of replication is made of.
replication.quota.window.size.seconds INT 1 unit=seconds low=1
    How long such a sample is.
security.inter.broker.protocol STRING PLAINTEXT of=PLAINTEXT,SSL,SASL_PLAINTEXT,SASL_SSL
    How brokers speak to each other, on the listener of that name; inter.broker.listener.name says
    another one.
sasl.mechanism.inter.broker.protocol STRING GSSAPI
    How this broker logs in to others, where the listener between brokers asks for it.
"""

_TOPIC = """
leader.replication.throttled.replicas LIST "" form=throttled-replicas
    PARTITION:BROKER, with commas between, or *: replicas whose leaders are throttled.
follower.replication.throttled.replicas LIST "" form=throttled-replicas
    The same for replicas that are throttled when they fetch.
"""

REPLICATION_KEYS = read_keys(_BROKER)
REPLICATION_TOPIC_KEYS = read_keys(_TOPIC)
