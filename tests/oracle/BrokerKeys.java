import java.lang.reflect.Field;
import java.util.*;
import java.util.regex.*;
import java.util.stream.Collectors;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.config.ConfigException;
import org.apache.kafka.server.config.AbstractKafkaConfig;

/**
 * Prints the configuration keys of Kafka's brokers, topics, groups and client metrics subscriptions,
 * one to a line, with tabs between: the kind of resource, name, type, default ("-" for none), whether
 * it is dynamic, whether it is internal, and the texts that are accepted and refused for it, each
 * followed by a "|". The texts are every number and word of the key's validator, the neighbours of
 * these numbers, and the bounds of the types. Runs on the jars of 3.9, 4.3 and 4.4.
 */
public class BrokerKeys {
    private static final List<String> NUMBERS = List.of(
        "-9223372036854775809", "-9223372036854775808", "-2147483649", "-2147483648", "-32769", "-32768",
        "-2", "-1", "0", "1", "2", "10", "1000", "32767", "32768", "2147483647", "2147483648",
        "9223372036854775807", "9223372036854775808", "0.5", "x", "");
    private static final Pattern NUMBER = Pattern.compile("-?\\d+");
    private static final Pattern WORD = Pattern.compile("[\\w.-]+");

    public static void main(String[] none) throws Exception {
        print("broker", AbstractKafkaConfig.CONFIG_DEF, dynamic());
        print("topic", definition("org.apache.kafka.storage.internals.log.LogConfig"), Set.of());
        print("group", definition("org.apache.kafka.coordinator.group.GroupConfig"), Set.of());
        print("client-metrics", definition("org.apache.kafka.server.metrics.ClientMetricsConfigs"), Set.of());
    }

    /** Returns the definition of a class, or an empty one if the version does not have the class. */
    private static ConfigDef definition(String name) throws Exception {
        Class<?> type;
        try {
            type = Class.forName(name);
        } catch (ClassNotFoundException hasNoSuchKeys) {
            return new ConfigDef();
        }
        for (Field field : type.getDeclaredFields()) {
            if (List.of("CONFIG", "CONFIG_DEF").contains(field.getName())) {
                field.setAccessible(true);
                return (ConfigDef) field.get(null);
            }
        }
        throw new NoSuchFieldException(name);
    }

    private static void print(String kind, ConfigDef definition, Set<String> dynamic) {
        for (ConfigDef.ConfigKey key : definition.configKeys().values()) {
            StringBuilder accepted = new StringBuilder();
            StringBuilder refused = new StringBuilder();
            for (String text : texts(key)) (accepts(key, text) ? accepted : refused).append(text).append('|');
            boolean hasNone = key.defaultValue == null || key.defaultValue == ConfigDef.NO_DEFAULT_VALUE;
            System.out.println(String.join("\t", kind, key.name, key.type.name(),
                hasNone ? "-" : '"' + ConfigDef.convertToString(key.defaultValue, key.type) + '"',
                String.valueOf(dynamic.contains(key.name)), String.valueOf(key.internalConfig), accepted, refused));
        }
    }

    private static Set<String> texts(ConfigDef.ConfigKey key) {
        Set<String> texts = new LinkedHashSet<>();
        String validator = String.valueOf(key.validator);
        switch (key.type) {
            case BOOLEAN: texts.addAll(List.of("true", "FALSE", "yes", "")); break;
            case STRING: case LIST:
                texts.addAll(List.of("", "x", "x,y", "x,x"));
                if (validator.contains("[")) {
                    Matcher words = WORD.matcher(validator.substring(validator.indexOf('[')));
                    while (words.find()) texts.addAll(List.of(words.group(), words.group().toLowerCase(Locale.ROOT)));
                }
                break;
            case SHORT: case INT: case LONG: case DOUBLE:
                texts.addAll(NUMBERS);
                Matcher numbers = NUMBER.matcher(validator);
                while (numbers.find()) {
                    long number = Long.parseLong(numbers.group());
                    for (long one = number - 1; one <= number + 1; one++) texts.add(String.valueOf(one));
                }
                break;
            default: texts.add("x");
        }
        return texts;
    }

    private static boolean accepts(ConfigDef.ConfigKey key, String text) {
        try {
            Object value = ConfigDef.parseType(key.name, text, key.type);
            if (key.validator != null) key.validator.ensureValid(key.name, value);
            return true;
        } catch (ConfigException refused) {
            return false;
        }
    }

    private static Set<String> dynamic() throws Exception {
        try {
            Field names = Class.forName("org.apache.kafka.server.config.DynamicBrokerConfig").getField("ALL_DYNAMIC_CONFIGS");
            return ((Collection<?>) names.get(null)).stream().map(String::valueOf).collect(Collectors.toSet());
        } catch (ClassNotFoundException is39) {
            Object module = Class.forName("kafka.server.DynamicBrokerConfig$").getField("MODULE$").get(null);
            String names = String.valueOf(module.getClass().getMethod("AllDynamicConfigs").invoke(module).toString());
            return Set.of(names.substring(names.indexOf('(') + 1, names.lastIndexOf(')')).split(", "));
        }
    }
}
