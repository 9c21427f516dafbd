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
    How long a fetch of the metadata waits for its answer.
controller.quorum.retry.backoff.ms INT 20 unit=ms low=0
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
zookeeper.connection.timeout.ms INT - unit=ms low=1
    How long a start waits for ZooKeeper; without it, as long as a session may be silent.
control.plane.listener.name STRING -
    The listener for connections between brokers and the controller on ZooKeeper; without it, they
    use the listener between brokers.
zookeeper.max.in.flight.requests INT 10 low=1
    Requests to ZooKeeper that are under way at the same time.
leader.imbalance.per.broker.percentage INT 10 unit=percent
    A controller on ZooKeeper lets the first replicas lead again when more than this share of those
    that a broker is the first replica of is led by others. Other controllers do so without a bound.
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
    How a key is derived from the secret; PBKDF2WithHmacSHA512 if it is not set.
password.encoder.cipher.algorithm STRING AES/CBC/PKCS5Padding of=AES/CBC/PKCS5Padding
    What encrypts them.
password.encoder.key.length INT 128 unit=bits low=128 high=256
    How long the key is: 128, 192 or 256.
password.encoder.iterations INT 4096 low=1024 high=1000000
    How often the secret is hashed for a key.
zookeeper.ssl.client.enable BOOLEAN false
    Whether connections to ZooKeeper are encrypted.
zookeeper.clientCnxnSocket STRING -
    With zookeeper.ssl.client.enable it must be org.apache.zookeeper.ClientCnxnSocketNetty.
zookeeper.ssl.keystore.location STRING -
    A PEM file with the private key and the certificate chain that this broker shows to ZooKeeper.
zookeeper.ssl.keystore.password PASSWORD -
    What the private key is encrypted with.
zookeeper.ssl.keystore.type STRING PEM
    The only form that is read is PEM.
zookeeper.ssl.truststore.location STRING -
    A PEM file with the CA certificates by which ZooKeeper's servers are verified.
zookeeper.ssl.truststore.password PASSWORD -
    Not for PEM.
zookeeper.ssl.truststore.type STRING PEM
    As zookeeper.ssl.keystore.type.
zookeeper.ssl.protocol STRING TLSv1.2 of=TLSv1.2,TLSv1.3
    The version of TLS, where zookeeper.ssl.enabled.protocols does not say more.
zookeeper.ssl.enabled.protocols LIST "" of=TLSv1.2,TLSv1.3
    The versions of TLS.
zookeeper.ssl.cipher.suites LIST ""
    As ssl.cipher.suites.
zookeeper.ssl.endpoint.identification.algorithm STRING HTTPS
    Whether the name in a server's certificate has to be its host's; empty for not at all.
zookeeper.ssl.crl.enable BOOLEAN false
    Not served: a start with it is refused.
zookeeper.ssl.ocsp.enable BOOLEAN false
    Not served: a start with it is refused.
zookeeper.metadata.migration.enable BOOLEAN false
    Not served: a start with it is refused.
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
