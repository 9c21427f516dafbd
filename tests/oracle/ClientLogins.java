import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.StringReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Base64;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Produces a record and reads it back for each input line, which has a topic and properties in Base64. */
public class ClientLogins {
    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            String[] words = line.split(" ");
            Properties properties = new Properties();
            properties.load(new StringReader(
                new String(Base64.getDecoder().decode(words[1]), StandardCharsets.UTF_8)));
            String told;
            try {
                told = exchange(words[0], properties) ? "ok" : "nothing came";
            } catch (ExecutionException error) {
                told = String.valueOf(error.getCause());
            } catch (Exception error) {
                told = error + " " + error.getCause();
            }
            System.out.println("> " + told.replace('\n', ' '));
        }
    }

    private static boolean exchange(String topic, Properties properties) throws Exception {
        properties.put("request.timeout.ms", "8000");
        properties.put("delivery.timeout.ms", "10000");
        properties.put("max.block.ms", "10000");
        properties.put("linger.ms", "0");
        StringSerializer writes = new StringSerializer();
        try (KafkaProducer<String, String> producer =
                 new KafkaProducer<>(properties, writes, writes)) {
            producer.send(new ProducerRecord<>(topic, 0, null, "java")).get();
        }
        StringDeserializer reads = new StringDeserializer();
        try (KafkaConsumer<String, String> consumer =
                 new KafkaConsumer<>(properties, reads, reads)) {
            List<TopicPartition> all = List.of(new TopicPartition(topic, 0));
            consumer.assign(all);
            consumer.seekToBeginning(all);
            long end = System.nanoTime() + 10_000_000_000L;
            while (System.nanoTime() < end) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) {
                    if ("java".equals(record.value())) {
                        return true;
                    }
                }
            }
        }
        return false;
    }
}
