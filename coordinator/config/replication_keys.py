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
    The most bytes of one partition that a follower fetches at once; the first batch may be larger.
replica.fetch.response.max.bytes INT 10485760 unit=bytes low=0
    The most bytes that a follower fetches with one request.
replica.fetch.min.bytes INT 1 unit=bytes low=0
    The bytes for which a leader delays the response to a follower.
replica.fetch.wait.max.ms INT 500 unit=ms
    The longest delay of a response to a follower; less than replica.lag.time.max.ms.
replica.fetch.backoff.ms INT 1000 unit=ms low=0
    How long a follower pauses a partition whose fetch has failed.
replica.socket.timeout.ms INT 30000 unit=ms
    How long a leader may take to answer; not less than replica.fetch.wait.max.ms.
leader.replication.throttled.rate LONG 9223372036854775807 unit=bytes/s low=0 dynamic
    The highest rate at which this broker sends to throttled replicas outside of the ISR.
follower.replication.throttled.rate LONG 9223372036854775807 unit=bytes/s low=0 dynamic
    The highest rate at which this broker fetches for throttled replicas outside of the ISR.
replication.quota.window.num INT 11 low=1
    The number of samples over which the rate of replication is measured.
replication.quota.window.size.seconds INT 1 unit=seconds low=1
    The length of one sample of the rate of replication.
security.inter.broker.protocol STRING PLAINTEXT of=PLAINTEXT,SSL,SASL_PLAINTEXT,SASL_SSL
    The security protocol between brokers, which is also the name of their listener unless
    inter.broker.listener.name is set.
sasl.mechanism.inter.broker.protocol STRING GSSAPI
    The SASL mechanism with which this broker logs in to others.
"""

_TOPIC = """
leader.replication.throttled.replicas LIST "" form=throttled-replicas
    Replicas whose leaders are throttled: PARTITION:BROKER pairs separated by commas, or *.
follower.replication.throttled.replicas LIST "" form=throttled-replicas
    Replicas that are throttled when they fetch: PARTITION:BROKER pairs, or *.
"""

REPLICATION_KEYS = read_keys(_BROKER)
REPLICATION_TOPIC_KEYS = read_keys(_TOPIC)
