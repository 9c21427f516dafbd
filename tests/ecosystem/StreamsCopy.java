import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Materialized;

/**
 * Copies a topic exactly once with Kafka Streams, and counts its keys in a store with a changelog.
 *
 * <p>Arguments: bootstrap servers, source, target, state directory. Runs until it is killed.
 */
public final class StreamsCopy {
    public static void main(String[] arguments) throws InterruptedException {
        var settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, "streams-copy");
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, arguments[3]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        settings.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        settings.put(
            StreamsConfig.producerPrefix(ProducerConfig.TRANSACTION_TIMEOUT_CONFIG), 10_000);
        settings.put(
            StreamsConfig.consumerPrefix(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG), 6000);
        settings.put(
            StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class.getName());
        settings.put(
            StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class.getName());
        var builder = new StreamsBuilder();
        var source = builder.<byte[], byte[]>stream(arguments[1]);
        source.to(arguments[2]);
        source.groupByKey().count(Materialized.as("counts"));
        var streams = new KafkaStreams(builder.build(), settings);
        streams.start();
        Thread.currentThread().join();
    }
}
