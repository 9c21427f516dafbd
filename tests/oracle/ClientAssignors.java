// Runs Apache Kafka's client-side assignors: one JSON case per line in, one answer per line out.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.Assignment;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.GroupSubscription;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.Subscription;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.consumer.RoundRobinAssignor;
import org.apache.kafka.clients.consumer.StickyAssignor;
import org.apache.kafka.clients.consumer.internals.ConsumerProtocol;
import org.apache.kafka.common.Cluster;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.PartitionInfo;

public class ClientAssignors {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int MOST_REPLICAS = 3;
    private static final HexFormat HEX = HexFormat.of();

    private static ConsumerPartitionAssignor assignor(String name) {
        switch (name) {
            case "range": return new RangeAssignor();
            case "roundrobin": return new RoundRobinAssignor();
            case "sticky": return new StickyAssignor();
            default: return new CooperativeStickyAssignor();
        }
    }

    private static Cluster cluster(JsonNode topics) {
        List<PartitionInfo> rows = new ArrayList<>();
        topics.fields().forEachRemaining(topic -> {
            for (int index = 0; index < topic.getValue().size(); index++) {
                List<Node> replicas = new ArrayList<>();
                for (JsonNode rack : topic.getValue().get(index))
                    replicas.add(new Node(replicas.size(), "host", 9092, rack.asText()));
                if (replicas.isEmpty())
                    replicas.add(new Node(0, "host", 9092));
                Node[] all = replicas.toArray(new Node[0]);
                rows.add(new PartitionInfo(topic.getKey(), index, all[0], all, all));
            }
        });
        List<Node> nodes = new ArrayList<>();
        for (int id = 0; id < MOST_REPLICAS; id++)
            nodes.add(new Node(id, "host", 9092));
        return new Cluster("id", nodes, rows, Set.of(), Set.of());
    }

    private static String hex(ByteBuffer buffer) {
        byte[] bytes = new byte[buffer.remaining()];
        buffer.duplicate().get(bytes);
        return HEX.formatHex(bytes);
    }

    @SuppressWarnings({"deprecation", "removal"})
    private static ObjectNode answer(JsonNode asked) {
        ObjectNode answer = JSON.createObjectNode();
        Map<String, Subscription> members = new HashMap<>();
        ObjectNode again = answer.putObject("subscriptions");
        for (JsonNode member : asked.get("members")) {
            String id = member.get(0).asText();
            Subscription read = ConsumerProtocol.deserializeSubscription(
                ByteBuffer.wrap(HEX.parseHex(member.get(2).asText())));
            if (!member.get(1).isNull())
                read.setGroupInstanceId(Optional.of(member.get(1).asText()));
            members.put(id, read);
            ArrayNode versions = again.putArray(id);
            for (short version = 0; version <= 3; version++)
                versions.add(hex(ConsumerProtocol.serializeSubscription(read, version)));
        }
        ConsumerPartitionAssignor assignor = assignor(asked.get("assignor").asText());
        Map<String, Assignment> given;
        try {
            given = assignor.assign(cluster(asked.get("topics")), new GroupSubscription(members))
                .groupAssignment();
        } catch (RuntimeException error) {
            return answer.put("error", error + " at " + error.getStackTrace()[0]);
        }
        ObjectNode bytes = answer.putObject("assignments");
        ObjectNode userData = answer.putObject("user_data");
        given.forEach((id, assignment) -> {
            bytes.put(id, hex(ConsumerProtocol.serializeAssignment(assignment)));
            assignor.onAssignment(assignment, new ConsumerGroupMetadata("g", 7, id, Optional.empty()));
            ByteBuffer data = assignor.subscriptionUserData(Set.of());
            userData.put(id, data == null ? null : hex(data));
        });
        return answer;
    }

    public static void main(String[] args) throws Exception {
        try (BufferedReader in = Files.newBufferedReader(Path.of(args[0]));
             PrintStream out = new PrintStream(Files.newOutputStream(Path.of(args[1])))) {
            for (String line = in.readLine(); line != null; line = in.readLine())
                out.println(answer(JSON.readTree(line)));
        }
    }
}
