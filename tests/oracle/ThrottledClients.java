// Runs Java's clients beyond their quotas, and prints whether each was throttled and got all records.

import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.Metric;
import org.apache.kafka.common.MetricName;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.quota.ClientQuotaFilterComponent;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class ThrottledClients {
    private static final int RECORDS = 58;
    private static final int RECORD_BYTES = 10_000;

    private static void tell(String what, Object told) {
        System.out.println("FACT " + what + ": " + told);
    }

    private static Map<String, Object> settings(String bootstrap, String clientId) {
        return new HashMap<>(Map.of("bootstrap.servers", bootstrap, "client.id", clientId));
    }

    private static void limit(AdminClient admin, String clientId, String key, Double value) throws Exception {
        ClientQuotaEntity entity = new ClientQuotaEntity(Map.of(ClientQuotaEntity.CLIENT_ID, clientId));
        admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, Set.of(new ClientQuotaAlteration.Op(key, value)))))
            .all().get(20, TimeUnit.SECONDS);
        ClientQuotaFilter only = ClientQuotaFilter.containsOnly(
            List.of(ClientQuotaFilterComponent.ofEntity(ClientQuotaEntity.CLIENT_ID, clientId)));
        while (!value.equals(admin.describeClientQuotas(only).entities().get().getOrDefault(entity, Map.of()).get(key))) {
            Thread.sleep(10);
        }
    }

    private static boolean waited(Map<MetricName, ? extends Metric> metrics, String name) {
        return metrics.entrySet().stream().anyMatch(one -> one.getKey().name().equals(name)
            && one.getValue().metricValue() instanceof Double value && value > 0);
    }

    private static String created(AdminClient admin, String name, int partitions, boolean retries) throws Exception {
        try {
            admin.createTopics(List.of(new NewTopic(name, partitions, (short) 1)),
                new CreateTopicsOptions().retryOnQuotaViolation(retries)).all().get(60, TimeUnit.SECONDS);
            return "created";
        } catch (ExecutionException failed) {
            return failed.getCause().getClass().getSimpleName();
        }
    }

    public static void main(String[] words) throws Exception {
        String bootstrap = words[0];
        try (AdminClient admin = AdminClient.create(settings(bootstrap, "java-admin"))) {
            created(admin, "java-limited", 1, true);
            limit(admin, "java-producer", "producer_byte_rate", 50_000.0);
            limit(admin, "java-consumer", "consumer_byte_rate", 50_000.0);
            limit(admin, "java-changer", "controller_mutation_rate", 1.0);

            Map<String, Object> told = settings(bootstrap, "java-producer");
            try (KafkaProducer<byte[], byte[]> producer =
                     new KafkaProducer<>(told, new ByteArraySerializer(), new ByteArraySerializer())) {
                for (int number = 0; number < RECORDS; number++) {
                    producer.send(new ProducerRecord<>("java-limited", new byte[RECORD_BYTES])).get(60, TimeUnit.SECONDS);
                }
                tell("the producer waited", waited(producer.metrics(), "produce-throttle-time-max"));
            }
            told = settings(bootstrap, "java-consumer");
            told.put("fetch.max.bytes", 100_000);
            try (KafkaConsumer<byte[], byte[]> consumer =
                     new KafkaConsumer<>(told, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
                Collection<TopicPartition> all = List.of(new TopicPartition("java-limited", 0));
                consumer.assign(all);
                consumer.seekToBeginning(all);
                int count = 0;
                long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
                while (count < RECORDS && System.nanoTime() < until) {
                    count += consumer.poll(Duration.ofMillis(200)).count();
                }
                tell("records that were read", count);
                tell("the consumer waited", waited(consumer.metrics(), "fetch-throttle-time-max"));
            }
            try (AdminClient changer = AdminClient.create(settings(bootstrap, "java-changer"))) {
                tell("a topic beyond the burst", created(changer, "java-changed-0", 13, false));
                tell("another at once", created(changer, "java-changed-1", 1, false));
                tell("another when it is time", created(changer, "java-changed-2", 1, true));
            }
        }
    }
}
