// Java's clients: see __init__.py. MORE is the group protocol, and a folder if Kafka Streams copies.

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.processor.api.ContextualProcessor;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;

public class Failover {
    private static final int PARTITIONS = 3;
    private static final AtomicInteger sent = new AtomicInteger();
    private static final AtomicInteger acknowledged = new AtomicInteger();
    private static final AtomicInteger read = new AtomicInteger();
    private static final AtomicInteger copied = new AtomicInteger();

    private static String bootstrap;
    private static String name;
    private static Path stop;
    private static String protocol = "classic";

    private interface Work {
        void run() throws Exception;
    }

    private static void tell(String role, String where, Throwable error) {
        StringBuilder kinds = new StringBuilder();
        for (Throwable one = error; one != null; one = one.getCause()) {
            kinds.append(kinds.length() == 0 ? "" : " from ").append(one.getClass().getSimpleName());
        }
        System.out.println("ERROR " + role + " " + where + ": " + kinds);
    }

    private static KafkaProducer<String, String> producer(Map<String, Object> more) {
        Map<String, Object> told = new HashMap<>(more);
        told.put("bootstrap.servers", bootstrap);
        return new KafkaProducer<>(told, new StringSerializer(), new StringSerializer());
    }

    private static KafkaConsumer<String, String> reader(Map<String, Object> more) {
        Map<String, Object> told = new HashMap<>(more);
        told.put("bootstrap.servers", bootstrap);
        told.put("enable.auto.commit", "false");
        told.put("auto.offset.reset", "earliest");
        told.put("isolation.level", "read_committed");
        return new KafkaConsumer<>(told, new StringDeserializer(), new StringDeserializer());
    }

    private static KafkaConsumer<String, String> consumer(String role) {
        KafkaConsumer<String, String> made =
            reader(Map.of("group.id", role + "-" + name, "group.protocol", protocol));
        made.subscribe(List.of("in-" + name));
        return made;
    }

    private static void write() throws Exception {
        try (KafkaProducer<String, String> producer = producer(Map.of("linger.ms", 5, "delivery.timeout.ms", 600_000))) {
            while (!Files.exists(stop)) {
                for (int index = 0; index < PARTITIONS; index++) {
                    producer.send(new ProducerRecord<>("in-" + name, index, null, "" + sent.getAndIncrement()),
                        (metadata, error) -> {
                            if (error == null) {
                                acknowledged.incrementAndGet();
                            } else {
                                tell("writer", "delivery", error);
                            }
                        });
                }
                Thread.sleep(60);
            }
            producer.flush();
            System.out.println("SENT " + sent.get());
        }
    }

    private static void read() {
        Set<String> seen = new HashSet<>();
        KafkaConsumer<String, String> reader = consumer("reader");
        while (true) {
            try {
                ConsumerRecords<String, String> records = reader.poll(Duration.ofMillis(100));
                records.forEach(one -> seen.add(one.value()));
                read.set(seen.size());
                if (!records.isEmpty()) {
                    reader.commitSync();
                }
            } catch (Exception error) {
                tell("reader", "poll or commitSync", error);
            }
        }
    }

    private static void copy() {
        while (true) {
            String where = "initTransactions";
            try (KafkaConsumer<String, String> reader = consumer("copier");
                 KafkaProducer<String, String> producer = producer(Map.of("transactional.id", "copier-" + name))) {
                try {
                    producer.initTransactions();
                    while (true) {
                        where = "poll";
                        ConsumerRecords<String, String> records = reader.poll(Duration.ofMillis(100));
                        if (records.isEmpty()) {
                            continue;
                        }
                        where = "beginTransaction";
                        producer.beginTransaction();
                        Map<TopicPartition, OffsetAndMetadata> ends = new HashMap<>();
                        for (ConsumerRecord<String, String> one : records) {
                            where = "send";
                            producer.send(new ProducerRecord<>("out-" + name, one.partition(), null, one.value()));
                            ends.put(new TopicPartition(one.topic(), one.partition()),
                                new OffsetAndMetadata(one.offset() + 1));
                        }
                        where = "sendOffsetsToTransaction";
                        producer.sendOffsetsToTransaction(ends, reader.groupMetadata());
                        where = "commitTransaction";
                        producer.commitTransaction();
                        copied.addAndGet(records.count());
                    }
                } catch (Exception error) {
                    tell("copier", where, error);
                }
            } catch (Exception error) {
                tell("copier", "close", error);
            }
        }
    }

    /** Checks the order of numbers against a state store, whose changes are part of the transactions. */
    private static class Copier extends ContextualProcessor<String, String, String, String> {
        @Override
        public void process(Record<String, String> record) {
            KeyValueStore<Integer, Integer> last = context().getStateStore("last");
            int number = Integer.parseInt(record.value());
            int index = number % PARTITIONS;
            Integer before = last.get(index);
            if (number != (before == null ? index : before + PARTITIONS)) {
                System.out.println("ERROR copier state: " + number + " after " + before);
            }
            last.put(index, number);
            context().forward(record);
        }
    }

    /** Copies as a Kafka Streams application; a read_committed consumer counts the copied records. */
    private static void stream(String folder) {
        Properties told = new Properties();
        told.put("bootstrap.servers", bootstrap);
        told.put("application.id", "copier-" + name);
        told.put("processing.guarantee", "exactly_once_v2");
        told.put("state.dir", folder);
        // The default of 10 s is too short: moving all leaders may take longer on a busy machine.
        told.put("producer.transaction.timeout.ms", 60_000);
        StreamsBuilder builder = new StreamsBuilder();
        builder.addStateStore(Stores.keyValueStoreBuilder(
            Stores.inMemoryKeyValueStore("last"), Serdes.Integer(), Serdes.Integer()));
        builder.stream("in-" + name, Consumed.with(Serdes.String(), Serdes.String()))
            .process(Copier::new, "last")
            .to("out-" + name, Produced.with(Serdes.String(), Serdes.String(), (topic, key, value, count) ->
                Optional.of(Set.of(Integer.parseInt(value) % PARTITIONS))));
        KafkaStreams streams = new KafkaStreams(builder.build(), told);
        streams.setUncaughtExceptionHandler(error -> {
            tell("copier", "a thread's end", error);
            return StreamThreadExceptionResponse.REPLACE_THREAD;
        });
        streams.start();
        KafkaConsumer<String, String> reader = reader(Map.of());
        reader.assign(List.of(new TopicPartition("out-" + name, 0),
            new TopicPartition("out-" + name, 1), new TopicPartition("out-" + name, 2)));
        reader.seekToBeginning(reader.assignment());
        while (true) {
            copied.addAndGet(reader.poll(Duration.ofMillis(100)).count());
        }
    }

    private static void start(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (Exception error) {
                tell("any", "the end of a thread", error);
            }
        });
        thread.setDaemon(true);
        thread.start();
    }

    public static void main(String[] words) throws Exception {
        bootstrap = words[0];
        name = words[1];
        stop = Path.of(words[2]);
        if (words.length > 3) {
            protocol = words[3];
        }
        start(Failover::write);
        start(Failover::read);
        if (words.length > 4) {
            start(() -> stream(words[4]));
        } else {
            start(Failover::copy);
        }
        while (true) {
            Thread.sleep(100);
            System.out.printf("AT %d %d %d %d%n", sent.get(), acknowledged.get(), read.get(), copied.get());
        }
    }
}
