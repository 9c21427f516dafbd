import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.core.KafkaTemplate;
import org.springframework.kafka.listener.BatchMessageListener;
import org.springframework.kafka.listener.ConcurrentMessageListenerContainer;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.transaction.KafkaTransactionManager;

/**
 * Copies a topic exactly once with Spring for Apache Kafka: a listener container of two threads
 * whose transaction manager sends the offsets with the records.
 *
 * <p>Arguments: bootstrap servers, source, target. Runs until it is killed.
 */
public final class SpringCopy {
    public static void main(String[] arguments) throws InterruptedException {
        String bootstrap = arguments[0], source = arguments[1], target = arguments[2];
        var producers = new DefaultKafkaProducerFactory<byte[], byte[]>(
            Map.of(
                ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap,
                ProducerConfig.TRANSACTION_TIMEOUT_CONFIG, 10_000),
            new ByteArraySerializer(),
            new ByteArraySerializer());
        producers.setTransactionIdPrefix("spring-copy-");
        var template = new KafkaTemplate<>(producers);
        var consumers = new DefaultKafkaConsumerFactory<byte[], byte[]>(
            Map.of(
                ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap,
                ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest",
                ConsumerConfig.ISOLATION_LEVEL_CONFIG, "read_committed",
                ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG, 6000,
                ConsumerConfig.MAX_POLL_RECORDS_CONFIG, 50),
            new ByteArrayDeserializer(),
            new ByteArrayDeserializer());
        var properties = new ContainerProperties(source);
        properties.setGroupId("spring-copy");
        properties.setKafkaAwareTransactionManager(new KafkaTransactionManager<>(producers));
        properties.setMessageListener((BatchMessageListener<byte[], byte[]>) records ->
            records.forEach(record -> template.send(target, record.partition(), record.key(), record.value())));
        var container = new ConcurrentMessageListenerContainer<>(consumers, properties);
        container.setConcurrency(2);
        container.start();
        Thread.currentThread().join();
    }
}
