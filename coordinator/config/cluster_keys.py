"""Keys of a node's roles and of its connection to controllers, with Kafka's names and defaults.

Source: ``KRaftConfigs``, ``QuorumConfig``, ``ReplicationConfigs``.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import read_keys

_BROKER = """
process.roles LIST broker,controller of=broker,controller
    What this node is: a broker of a cluster whose controllers are elsewhere, a controller without
    partitions of its own, or both: a broker that is its own controller, and that other brokers may
    join if it has a listener of controller.listener.names.
controller.quorum.bootstrap.servers LIST ""
    HOST:PORT of controllers, of which one is asked where the active one is.
controller.quorum.voters LIST ""
    ID@HOST:PORT of every controller, where controller.quorum.bootstrap.servers is not set.
controller.quorum.fetch.timeout.ms INT 2000 unit=ms low=0
    How long the active controller may be silent before another one is asked.
controller.quorum.request.timeout.ms INT 2000 unit=ms low=0
    How long a fetch of the metadata log waits for its response.
controller.quorum.retry.backoff.ms INT 20 unit=ms low=0
    The pause before a failed fetch of the metadata log is repeated.
controller.socket.timeout.ms INT 30000 unit=ms
    How long requests to a controller wait for a response, other than fetches of the metadata
    log.
broker.heartbeat.interval.ms INT 2000 unit=ms
    How often a broker tells the controller that it is alive.
broker.session.timeout.ms INT 9000 unit=ms
    A broker without heartbeats for this long is fenced; the controller's own value
    counts.
initial.broker.registration.timeout.ms INT 60000 unit=ms
    A broker that could not register within this time gives up.
sasl.mechanism.controller.protocol STRING GSSAPI
    How this node logs in to controllers, where their listener asks for it.
offsets.topic.replication.factor SHORT 3 low=1
    Replicas of __consumer_offsets, if the controllers are elsewhere; a broker alone keeps one.
transaction.state.log.replication.factor SHORT 3 low=1
    Replicas of __transaction_state, if the controllers are elsewhere; a broker alone keeps
    one.
transaction.state.log.min.isr INT 2 low=1
    min.insync.replicas of __transaction_state; no more than it has replicas.
controlled.shutdown.enable BOOLEAN true
    Whether a broker moves its leaderships to other brokers before it stops.
controlled.shutdown.max.retries INT 3
    How often a stopping broker asks a controller on ZooKeeper to move its remaining
    leaderships.
controlled.shutdown.retry.backoff.ms LONG 5000 unit=ms
    The pause between two requests of a stopping broker to move its remaining leaderships.
zookeeper.connect STRING ""
    HOST:PORT of ZooKeeper's servers, with commas between and maybe a path behind: the brokers elect
    their controller there, instead of having controllers elsewhere.
zookeeper.session.timeout.ms INT 18000 unit=ms low=1
    A broker from which ZooKeeper has not heard for this long counts as dead.
zookeeper.connection.timeout.ms INT - unit=ms low=1
    How long a start waits for ZooKeeper; by default zookeeper.session.timeout.ms.
control.plane.listener.name STRING -
    The listener for connections between brokers and the controller on ZooKeeper; without it, they
    use the listener between brokers.
zookeeper.max.in.flight.requests INT 10 low=1
    Requests to ZooKeeper that are under way at the same time.
leader.imbalance.per.broker.percentage INT 10 unit=percent
    A controller on ZooKeeper elects preferred leaders when other brokers lead more than this
    share of the partitions whose preferred replica a broker has. Other controllers do so at
    any share.
zookeeper.set.acl BOOLEAN false
    Only clients with this broker's ZooKeeper login may change the znodes that it writes, and read
    users, settings of brokers and tokens.
fencepost.zookeeper.jaas.config PASSWORD -
    How this broker logs in to ZooKeeper: what stands in the section Client of the file that a Java
    broker is given, org.apache.zookeeper.server.auth.DigestLoginModule with username and password.
password.encoder.secret PASSWORD -
    The secret that encrypts this broker's passwords in ZooKeeper; without it they cannot be changed
    while it runs.
password.encoder.old.secret PASSWORD -
    The previous secret: a start encrypts again the passwords that were encrypted with it.
password.encoder.keyfactory.algorithm STRING - of=PBKDF2WithHmacSHA1,PBKDF2WithHmacSHA512
    How a key is derived from password.encoder.secret; PBKDF2WithHmacSHA512 if it is not set.
password.encoder.cipher.algorithm STRING AES/CBC/PKCS5Padding of=AES/CBC/PKCS5Padding
    The cipher that encrypts passwords in ZooKeeper.
password.encoder.key.length INT 128 unit=bits low=128 high=256
    The length of the key that encrypts passwords in ZooKeeper: 128, 192 or 256.
password.encoder.iterations INT 4096 low=1024 high=1000000
    How often password.encoder.secret is hashed to derive a key.
zookeeper.ssl.client.enable BOOLEAN false
    Whether connections to ZooKeeper are encrypted.
zookeeper.clientCnxnSocket STRING -
    With zookeeper.ssl.client.enable it must be org.apache.zookeeper.ClientCnxnSocketNetty.
zookeeper.ssl.keystore.location STRING -
    A PEM file with the private key and the certificate chain that this broker shows to ZooKeeper.
zookeeper.ssl.keystore.password PASSWORD -
    The password of the private key in zookeeper.ssl.keystore.location.
zookeeper.ssl.keystore.type STRING PEM
    Only PEM is supported.
zookeeper.ssl.truststore.location STRING -
    A PEM file with the CA certificates by which ZooKeeper's servers are verified.
zookeeper.ssl.truststore.password PASSWORD -
    Not used: a PEM truststore has no password.
zookeeper.ssl.truststore.type STRING PEM
    Only PEM is supported.
zookeeper.ssl.protocol STRING TLSv1.2 of=TLSv1.2,TLSv1.3
    The version of TLS for connections to ZooKeeper, if zookeeper.ssl.enabled.protocols is
    empty.
zookeeper.ssl.enabled.protocols LIST "" of=TLSv1.2,TLSv1.3
    The versions of TLS for connections to ZooKeeper.
zookeeper.ssl.cipher.suites LIST ""
    Cipher suites for connections to ZooKeeper; see ssl.cipher.suites.
zookeeper.ssl.endpoint.identification.algorithm STRING HTTPS
    Whether the name in a server's certificate has to be its host's; empty for not at all.
zookeeper.ssl.crl.enable BOOLEAN false
    Not supported: if it is true, the broker does not start.
zookeeper.ssl.ocsp.enable BOOLEAN false
    Not supported: if it is true, the broker does not start.
zookeeper.metadata.migration.enable BOOLEAN false
    Not supported: if it is true, the broker does not start.
"""

CLUSTER_KEYS = read_keys(_BROKER)

ON_ZOOKEEPER = {
    key.name
    for key in CLUSTER_KEYS
    if key.name.startswith(("zookeeper.", "password.encoder."))
    or key.name
    in {
        "control.plane.listener.name",
        "fencepost.zookeeper.jaas.config",
        "leader.imbalance.per.broker.percentage",
    }
} - {"zookeeper.connect"}
"""Keys that have no effect without ``zookeeper.connect``."""
