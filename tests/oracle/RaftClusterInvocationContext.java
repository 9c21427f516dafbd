package org.apache.kafka.common.test.junit;

import static org.junit.jupiter.api.Assumptions.abort;

import java.io.File;
import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.function.Function;
import java.util.stream.Collectors;
import kafka.network.SocketServer;
import kafka.server.ControllerServer;
import kafka.server.KafkaBroker;
import kafka.server.KafkaConfig;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.FeatureUpdate;
import org.apache.kafka.clients.admin.FeatureUpdate.UpgradeType;
import org.apache.kafka.clients.admin.ListTopicsOptions;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.admin.TopicListing;
import org.apache.kafka.clients.admin.UpdateFeaturesOptions;
import org.apache.kafka.clients.consumer.GroupProtocol;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.network.ListenerName;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.common.test.ClusterInstance;
import org.apache.kafka.common.test.api.ClusterConfig;
import org.apache.kafka.common.test.api.Type;
import org.apache.kafka.controller.Controller;
import org.apache.kafka.coordinator.group.GroupCoordinator;
import org.apache.kafka.metadata.LeaderAndIsr;
import org.apache.kafka.metadata.MetadataCache;
import org.apache.kafka.server.fault.FaultHandlerException;
import org.junit.jupiter.api.extension.AfterEachCallback;
import org.junit.jupiter.api.extension.BeforeEachCallback;
import org.junit.jupiter.api.extension.ConditionEvaluationResult;
import org.junit.jupiter.api.extension.ExecutionCondition;
import org.junit.jupiter.api.extension.Extension;
import org.junit.jupiter.api.extension.TestTemplateInvocationContext;
import sun.misc.Unsafe;

/**
 * Starts a fencepost daemon for each of Apache Kafka's tests that requests a cluster. The class
 * precedes Kafka's class of the same name on the class path. A test is aborted with a reason if it
 * needs several brokers, or anything that a client cannot do.
 *
 * <p>The system properties fencepost.python and fencepost.data name the interpreter and a folder.
 */
public class RaftClusterInvocationContext implements TestTemplateInvocationContext {
    private final String test;
    private final ClusterConfig config;
    private final boolean isCombined;

    public RaftClusterInvocationContext(String test, ClusterConfig config, boolean isCombined) {
        this.test = test;
        this.config = config;
        this.isCombined = isCombined;
    }

    @Override
    public String getDisplayName(int index) {
        return test;
    }

    @Override
    public List<Extension> getAdditionalExtensions() {
        Daemon daemon = new Daemon(config);
        boolean isSecond = isCombined && config.clusterTypes().contains(Type.KRAFT);
        return List.of(
            (ExecutionCondition) context -> isSecond
                ? ConditionEvaluationResult.disabled("a controller apart would be the same")
                : ConditionEvaluationResult.enabled("the first kind of cluster"),
            (BeforeEachCallback) context -> {
                if (config.numBrokers() != 1) abort("needs several brokers");
                if (config.isAutoStart()) daemon.start();
            },
            (AfterEachCallback) context -> daemon.stop(),
            new ClusterInstanceParameterResolver(daemon));
    }

    /** The operations of a test on its cluster, which consists of one daemon. */
    private static class Daemon implements ClusterInstance {
        private static final int NODE = 0;

        private final ClusterConfig config;
        private final Map<String, String> settings = new HashMap<>();
        private Path directory;
        private Process process;
        private String address = "127.0.0.1:0";
        private Admin admin;
        private KafkaBroker broker;

        Daemon(ClusterConfig config) {
            this.config = config;
            settings.put("node.id", String.valueOf(NODE));
            settings.put("group.initial.rebalance.delay.ms", "0");
            settings.putAll(config.serverProperties());
            settings.keySet().removeIf(key -> key.startsWith("unstable."));
        }

        @Override
        public void start() {
            launch();
            config.features().forEach((feature, level) -> {
                // Try both types, because only the daemon knows whether this is a downgrade.
                for (UpgradeType type : List.of(UpgradeType.SAFE_DOWNGRADE, UpgradeType.UPGRADE)) {
                    try {
                        admin.updateFeatures(
                            Map.of(feature.featureName(), new FeatureUpdate(level, type)),
                            new UpdateFeaturesOptions()).all().get();
                        return;
                    } catch (InterruptedException | ExecutionException refused) {
                        if (type == UpgradeType.UPGRADE) abort(refused.getMessage());
                    }
                }
            });
        }

        private void launch() {
            try {
                if (directory == null) {
                    Path data = Path.of(System.getProperty("fencepost.data"));
                    directory = Files.createTempDirectory(data, "of");
                }
                List<String> command = new ArrayList<>(List.of(
                    System.getProperty("fencepost.python"), "-m", "fencepost", "serve",
                    "--data-dir", directory.toString(), "--listen", address));
                settings.forEach((key, value) ->
                    command.addAll(List.of("--config", key + "=" + value)));
                File log = new File(directory + ".log");
                process = new ProcessBuilder(command)
                    .redirectError(ProcessBuilder.Redirect.appendTo(log)).start();
                String line = process.inputReader().readLine();
                if (line == null) throw new IllegalStateException(Files.readString(log.toPath()));
                address = line.substring("listening ".length());
                admin = Admin.create(Map.of("bootstrap.servers", address));
            } catch (java.io.IOException problem) {
                throw new IllegalStateException(problem);
            }
        }

        @Override
        public void stop() {
            if (process == null) return;
            if (admin != null) admin.close();
            try {
                process.destroyForcibly().waitFor();
            } catch (InterruptedException problem) {
                throw new IllegalStateException(problem);
            }
            process = null;
        }

        @Override
        public boolean started() {
            return directory != null;
        }

        @Override
        public boolean stopped() {
            return started() && process == null;
        }

        @Override
        public void startBroker(int id) {
            launch();
        }

        @Override
        public void shutdownBroker(int id) {
            stop();
        }

        @Override
        public void waitForReadyBrokers() {
            // The daemon only listens once it is ready.
        }

        @Override
        public void waitTopicDeletion(String topic) throws InterruptedException {
            while (described(topic).isPresent()) Thread.sleep(20);
        }

        @Override
        public Type type() {
            return Type.CO_KRAFT;
        }

        @Override
        public ClusterConfig config() {
            return config;
        }

        @Override
        public String bootstrapServers() {
            return address;
        }

        @Override
        public List<Integer> brokerBoundPorts() {
            return List.of(port());
        }

        private int port() {
            return Integer.parseInt(address.substring(address.lastIndexOf(':') + 1));
        }

        @Override
        public ListenerName clientListener() {
            return ListenerName.forSecurityProtocol(SecurityProtocol.PLAINTEXT);
        }

        @Override
        public Set<GroupProtocol> supportedGroupProtocols() {
            return Set.of(GroupProtocol.values());
        }

        @Override
        public String clusterId() {
            try {
                return admin.describeCluster().clusterId().get();
            } catch (InterruptedException | ExecutionException problem) {
                throw new IllegalStateException(problem);
            }
        }

        @Override
        public Map<Integer, ControllerServer> controllers() {
            // Tests that create a topic wait for the log of each controller in values(); there is
            // none. Those that look one up by its id want topic ids.
            return new HashMap<>() {
                @Override
                public ControllerServer get(Object id) {
                    return controller();
                }
            };
        }

        @Override
        public Set<Integer> controllerIds() {
            return Set.of(NODE);
        }

        /** Returns a controller that only knows the topic ids, which tests read in preparation. */
        private ControllerServer controller() {
            Controller topics = standIn(Controller.class, Map.of(
                "findAllTopicIds", of -> CompletableFuture.completedFuture(topicIds())));
            ControllerServer server = hollow(ControllerServer.class);
            server.controller_$eq(topics);
            return server;
        }

        /** Returns an object without its constructor, which would need the parts of a broker. */
        private static <T> T hollow(Class<T> kind) {
            try {
                Field unsafe = Unsafe.class.getDeclaredField("theUnsafe");
                unsafe.setAccessible(true);
                return kind.cast(((Unsafe) unsafe.get(null)).allocateInstance(kind));
            } catch (ReflectiveOperationException problem) {
                throw new IllegalStateException(problem);
            }
        }

        /** A broker's server, of which tests only ask the port. */
        private static class Ports extends SocketServer {
            int port;

            Ports() {
                super(null, null, null, null, null, null, null);
            }

            @Override
            public int boundPort(ListenerName listener) {
                return port;
            }
        }

        private Ports ports() {
            Ports ports = hollow(Ports.class);
            ports.port = port();
            return ports;
        }

        private Map<String, Uuid> topicIds() {
            try {
                return admin.listTopics(new ListTopicsOptions().listInternal(true)).listings().get()
                    .stream().collect(Collectors.toMap(TopicListing::name, TopicListing::topicId));
            } catch (InterruptedException | ExecutionException problem) {
                throw new IllegalStateException(problem);
            }
        }

        @Override
        public ListenerName controllerListenerName() {
            return config.controllerListenerName();
        }

        @Override
        public String bootstrapControllers() {
            return noController();
        }

        @Override
        public List<Integer> controllerBoundPorts() {
            return noController();
        }

        private static <T> T noController() {
            return abort("asks a controller");
        }

        @Override
        public Optional<FaultHandlerException> firstFatalException() {
            return Optional.empty();
        }

        @Override
        public Optional<FaultHandlerException> firstNonFatalException() {
            return Optional.empty();
        }

        @Override
        public Map<Integer, KafkaBroker> brokers() {
            if (broker == null) broker = broker();
            return Map.of(NODE, broker);
        }

        /** Returns a broker object with the settings and topics, which tests read in preparation. */
        private KafkaBroker broker() {
            Properties properties = new Properties();
            properties.putAll(settings);
            properties.putAll(Map.of(
                "process.roles", "broker",
                "controller.listener.names", "CONTROLLER",
                "controller.quorum.voters", "1@127.0.0.1:1",
                "listeners", "PLAINTEXT://" + address));
            KafkaConfig parsed = new KafkaConfig(properties);
            MetadataCache topics = standIn(MetadataCache.class, Map.of(
                "numPartitions", of -> described(of[0]).map(topic -> topic.partitions().size()),
                "getLeaderAndIsr", of -> described(of[0]).map(topic -> {
                    TopicPartitionInfo row = topic.partitions().get((int) of[1]);
                    List<Integer> isr = row.isr().stream().map(Node::id).toList();
                    return new LeaderAndIsr(row.leader().id(), isr);
                })));
            GroupCoordinator groups = standIn(GroupCoordinator.class, Map.of(
                "groupMetadataTopicConfigs", of -> new Properties()));
            return standIn(KafkaBroker.class, Map.of(
                "config", of -> parsed,
                "boundPort", of -> port(),
                "socketServer", of -> ports(),
                "isShutdown", of -> process == null,
                "metadataCache", of -> topics,
                "groupCoordinator", of -> groups));
        }

        private Optional<TopicDescription> described(Object topic) {
            try {
                return Optional.of(admin.describeTopics(List.of((String) topic))
                    .allTopicNames().get().get(topic));
            } catch (ExecutionException problem) {
                if (problem.getCause() instanceof UnknownTopicOrPartitionException) {
                    return Optional.empty();
                }
                throw new IllegalStateException(problem);
            } catch (InterruptedException problem) {
                throw new IllegalStateException(problem);
            }
        }

        private static <T> T standIn(Class<T> kind, Map<String, Function<Object[], ?>> known) {
            return kind.cast(Proxy.newProxyInstance(
                kind.getClassLoader(), new Class<?>[] {kind}, (self, method, arguments) -> {
                    Function<Object[], ?> answer = known.get(method.getName());
                    if (answer != null) return answer.apply(arguments);
                    String asked = kind.getSimpleName() + "." + method.getName();
                    return abort("looks into the broker: " + asked);
                }));
        }
    }
}
