"""Keys of a node's roles, and of its way to the controllers, with Kafka's names and defaults.

Source: ``KRaftConfigs``, ``QuorumConfig``, ``ReplicationConfigs``.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import read_keys

_BROKER = """
process.roles LIST broker,controller of=broker,controller
    What this node is: a broker of a cluster whose controllers are elsewhere, a controller without
    partitions of its own, or both: a broker that needs nobody else, and whom others may join if it
    has a listener of controller.listener.names.
controller.quorum.bootstrap.servers LIST ""
    HOST:PORT of controllers, of which one is asked where the active one is.
controller.quorum.voters LIST ""
    ID@HOST:PORT of every controller, where controller.quorum.bootstrap.servers is not set.
controller.quorum.fetch.timeout.ms INT 2000 unit=ms
    How long the active controller may be silent before another one is asked.
controller.quorum.request.timeout.ms INT 2000 unit=ms
    How long a fetch of the metadata waits for its answer.
controller.quorum.retry.backoff.ms INT 20 unit=ms
    The pause before a failed one is repeated.
controller.socket.timeout.ms INT 30000 unit=ms
    How long any other request to a controller waits for its answer.
broker.heartbeat.interval.ms INT 2000 unit=ms
    How often a broker tells the controller that it is alive.
broker.session.timeout.ms INT 9000 unit=ms
    A broker that was silent for so long is fenced; the controller's own value counts.
initial.broker.registration.timeout.ms INT 60000 unit=ms
    A broker that could not register within this time gives up.
sasl.mechanism.controller.protocol STRING GSSAPI
    How this node logs in to controllers, where their listener asks for it.
offsets.topic.replication.factor SHORT 3 low=1
    Replicas of __consumer_offsets, where the controllers are elsewhere; a broker alone keeps one.
transaction.state.log.replication.factor SHORT 3 low=1
    The same of __transaction_state.
transaction.state.log.min.isr INT 2 low=1
    Its min.insync.replicas; never more than it has replicas.
controlled.shutdown.enable BOOLEAN true
    Whether a broker that stops hands over first what it leads.
controlled.shutdown.max.retries INT 3
    So often it asks a controller on ZooKeeper to take over, as long as some of it is left.
controlled.shutdown.retry.backoff.ms LONG 5000 unit=ms
    How long it waits between two times.
zookeeper.connect STRING ""
    HOST:PORT of ZooKeeper's servers, with commas between and maybe a path behind: the brokers elect
    their controller there, instead of having controllers elsewhere.
zookeeper.session.timeout.ms INT 18000 unit=ms low=1
    A broker that ZooKeeper has not heard of for so long is dead.
zookeeper.connection.timeout.ms INT 18000 unit=ms low=1
    How long a start waits for ZooKeeper.
"""

CLUSTER_KEYS = read_keys(_BROKER)
