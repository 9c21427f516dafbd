import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.Optional;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Copies a topic exactly once with Apache Flink: checkpoints every 300 ms, a transactional sink of
 * two writers, and a start from the newest complete checkpoint.
 *
 * <p>Arguments: bootstrap servers, source, target, a folder for checkpoints, and optionally the size
 * from which state gets a file of its own. Runs until it is killed.
 */
public final class FlinkCopy {
    public static void main(String[] arguments) throws Exception {
        String bootstrap = arguments[0], source = arguments[1], target = arguments[2];
        Path folder = Path.of(arguments[3]);
        var settings = new Configuration();
        settings.setString("execution.checkpointing.dir", folder.toUri().toString());
        settings.setString("execution.checkpointing.interval", "300ms");
        settings.setString("execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION");
        settings.setString("rest.bind-address", "127.0.0.1");
        if (arguments.length > 4) settings.setString("execution.checkpointing.data-inline-threshold", arguments[4]);
        newest(folder).ifPresent(
            checkpoint -> settings.setString("execution.state-recovery.path", checkpoint.toUri().toString()));
        var environment = StreamExecutionEnvironment.createLocalEnvironment(2, settings);
        var numbers = KafkaSource.<String>builder()
            .setBootstrapServers(bootstrap)
            .setTopics(source)
            .setGroupId("flink-copy")
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setValueOnlyDeserializer(new SimpleStringSchema())
            .setProperty("isolation.level", "read_committed")
            .build();
        var copies = KafkaSink.<String>builder()
            .setBootstrapServers(bootstrap)
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix("flink-copy")
            // Longer than a restart takes on a busy machine: Flink drops a pre-committed transaction
            // that the coordinator has aborted, and goes on behind its records.
            .setProperty("transaction.timeout.ms", "60000")
            .setRecordSerializer(KafkaRecordSerializationSchema.<String>builder()
                .setTopic(target)
                .setValueSerializationSchema(new SimpleStringSchema())
                .build())
            .build();
        environment.fromSource(numbers, WatermarkStrategy.noWatermarks(), "numbers")
            .uid("numbers")
            .sinkTo(copies)
            .uid("copies");
        environment.execute("copy");
    }

    /** The newest checkpoint of any job in the folder that was written to its end. */
    private static Optional<Path> newest(Path folder) throws Exception {
        if (!Files.isDirectory(folder)) return Optional.empty();
        try (var files = Files.walk(folder)) {
            return files.filter(file -> file.getFileName().toString().equals("_metadata"))
                .max(Comparator.comparingLong(file -> file.toFile().lastModified()))
                .map(Path::getParent);
        }
    }
}
