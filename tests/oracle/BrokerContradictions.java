import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Map;
import kafka.server.KafkaConfig;

/**
 * Reads settings of a broker, "KEY=VALUE KEY=VALUE …" on a line, and prints for each line whether
 * Kafka accepts or refuses them together.
 */
public class BrokerContradictions {
    private static final Map<String, String> NODE = Map.of(
        "process.roles", "broker,controller",
        "node.id", "1",
        "controller.quorum.voters", "1@localhost:9093",
        "controller.listener.names", "CONTROLLER",
        "listeners", "PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093");

    public static void main(String[] none) throws IOException {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            Map<String, String> settings = new HashMap<>(NODE);
            for (String pair : line.split(" ")) {
                String[] parts = pair.split("=", 2);
                settings.put(parts[0], parts[1]);
            }
            try {
                new KafkaConfig(settings);
                System.out.println("accepted");
            } catch (RuntimeException refused) {
                System.out.println("refused");
            }
        }
    }
}
