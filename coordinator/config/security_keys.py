"""Keys of TLS, authentication, authorization and quotas, with Kafka's names and defaults.

Keys in :data:`OF_LISTENERS` may be set for one listener, as ``listener.name.NAME.KEY`` with the
name in lower case. SASL keys may also be set for one mechanism of a listener, as
``listener.name.NAME.MECHANISM.KEY``. The most specific setting wins.

Source: ``BrokerSecurityConfigs``, ``SslConfigs``, ``SaslConfigs``, ``SocketServerConfigs``,
``QuotaConfig``, ``StandardAuthorizer``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.key import ConfigKey, read_keys

_LISTENERS = """
ssl.keystore.type STRING PEM dynamic
    Only PEM is supported; Apache Kafka's default is JKS.
ssl.keystore.location STRING - dynamic
    A PEM file with the private key and the certificate chain of a listener.
ssl.keystore.key PASSWORD - dynamic
    The private key itself, in PEM; with ssl.keystore.certificate.chain, instead of a file.
ssl.keystore.certificate.chain PASSWORD - dynamic
    The certificate chain itself, in PEM.
ssl.keystore.password PASSWORD - dynamic
    Not used: a PEM keystore has no password, but its key may have ssl.key.password.
ssl.key.password PASSWORD - dynamic
    The password of the private key.
ssl.truststore.type STRING PEM dynamic
    Only PEM is supported; Apache Kafka's default is JKS.
ssl.truststore.location STRING - dynamic
    A PEM file with the CA certificates by which clients' certificates are verified.
ssl.truststore.certificates PASSWORD - dynamic
    The CA certificates of ssl.truststore.location as a PEM text.
ssl.truststore.password PASSWORD - dynamic
    Not used: a PEM truststore has no password.
ssl.client.auth STRING none of=none,requested,required
    Whether clients must show a certificate. For a listener with SASL only its own setting
    counts, listener.name.NAME.ssl.client.auth.
ssl.protocol STRING TLSv1.3
    The newest version of TLS: TLSv1.2, TLSv1.3, or TLS for the newest of all.
ssl.enabled.protocols LIST TLSv1.2,TLSv1.3 of=TLSv1.2,TLSv1.3
    The versions of TLS.
ssl.cipher.suites LIST ""
    By their registered names or OpenSSL's; empty for what OpenSSL takes for good. Of TLS 1.3 there
    are all as soon as one is named, and none if only others are.
ssl.principal.mapping.rules STRING DEFAULT
    Rules that map the name in a client's certificate to a user name.
ssl.endpoint.identification.algorithm STRING https
    How this broker checks the name in another broker's certificate; empty for not at all.
ssl.allow.dn.changes BOOLEAN false
    A certificate that is read again may have another subject.
ssl.allow.san.changes BOOLEAN false
    A certificate that is read again may lack names that it had.
sasl.enabled.mechanisms LIST GSSAPI
    What clients may log in with: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER. Kafka's default
    is not served here.
sasl.jaas.config PASSWORD -
    Users of PLAIN, or options of OAUTHBEARER, in Kafka's form.
sasl.server.max.receive.size INT 65536 unit=bytes low=1
    The largest request of a client that has not logged in, which may not hold more memory than
    twice that; 524288 in Apache Kafka.
connections.max.reauth.ms LONG 0 unit=ms low=0
    The longest session of a login, after which the client must log in again; 0 sets no limit
    but the token's.
connection.failed.authentication.delay.ms INT 100 unit=ms low=0
    How long the answer to a failed login is held back.
sasl.oauthbearer.jwks.endpoint.url STRING -
    The URL of the keys that verify tokens' signatures.
sasl.oauthbearer.jwks.endpoint.refresh.ms LONG 3600000 unit=ms low=1
    How often the keys of sasl.oauthbearer.jwks.endpoint.url are fetched.
sasl.oauthbearer.jwks.endpoint.retry.backoff.ms LONG 100 unit=ms low=1
    The first pause after a failed fetch of the keys.
sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms LONG 10000 unit=ms low=1
    The longest pause after failed fetches of the keys.
sasl.oauthbearer.expected.issuer STRING -
    The required issuer of a token.
sasl.oauthbearer.expected.audience LIST ""
    The accepted audiences; a token must name at least one of them.
sasl.oauthbearer.allow.unverified.issuer BOOLEAN false
    Accept tokens of any issuer if sasl.oauthbearer.expected.issuer is not set; without either,
    the broker does not start.
sasl.oauthbearer.allow.unverified.audience BOOLEAN false
    Accept tokens for any audience if sasl.oauthbearer.expected.audience is empty; without
    either, the broker does not start.
sasl.oauthbearer.clock.skew.seconds INT 30 unit=seconds low=0
    By how much others' clocks may differ.
sasl.oauthbearer.scope.claim.name STRING scope
    The claim with a token's scope.
sasl.oauthbearer.sub.claim.name STRING sub
    The claim with the user.
max.connections INT 10000 low=1 dynamic
    Open connections of the broker or of one listener: a further client waits until one is
    closed. Kafka sets no bound.
max.connection.creation.rate INT 2147483647 unit=connections/s low=1 dynamic
    New connections per second, of the broker or of one listener: a client beyond the rate
    waits.
"""

_BROKER = """
fencepost.authentication.timeout.ms INT 10000 unit=ms low=1
    A connection whose login takes longer is closed. Kafka has only connections.max.idle.ms.
fencepost.unauthenticated.connections.per.ip INT 1000 low=1
    Connections of one address that have not logged in yet.
inter.broker.listener.name STRING -
    The listener of the brokers among themselves; if it is not set, the one that has the name of
    security.inter.broker.protocol. It gets its connections even beyond max.connections, where there
    are several: the longest unused connection of another one is closed for it.
max.connections.per.ip.overrides STRING "" form=counts-of-addresses dynamic
    HOST:COUNT, with commas between: other bounds than max.connections.per.ip for some addresses.
authorizer.class.name STRING ""
    org.apache.kafka.metadata.authorizer.StandardAuthorizer makes ACLs decide what clients may
    do (on ZooKeeper kafka.security.authorizer.AclAuthorizer); without an authorizer every
    client may do everything.
super.users STRING ""
    Principals with every right, TYPE:NAME with semicolons between.
allow.everyone.if.no.acl.found BOOLEAN false
    Whether everyone may use a resource that has no ACL.
quota.window.num INT 11 low=1
    The number of samples over which a client's rate is measured.
quota.window.size.seconds INT 1 unit=seconds low=1
    The length of one sample of a client's rate.
controller.quota.window.num INT 11 low=1
    The number of samples for which a client may save unused partition mutations.
controller.quota.window.size.seconds INT 1 unit=seconds low=1
    The length of one sample of the controller mutation quota.
"""

_LISTENER_KEYS = read_keys(_LISTENERS)
SECURITY_KEYS = (*_LISTENER_KEYS, *read_keys(_BROKER))

OF_LISTENERS: Mapping[str, ConfigKey] = {key.name: key for key in _LISTENER_KEYS}
"""Keys that can also be set for one listener, by name."""
