import java.lang.reflect.Field;
import java.util.*;
import java.util.regex.*;
import java.util.stream.Collectors;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.config.ConfigException;
import org.apache.kafka.server.config.AbstractKafkaConfig;

/**
 * Prints the configuration keys of Kafka's brokers, one to a line, with tabs between: name, type,
 * default ("-" for none), whether it is dynamic, and the texts that are accepted and refused for it,
 * each followed by a "|". The texts are every number and word of the key's validator, the neighbours
 * of these numbers, and the bounds of the types. Runs on the jars of 3.9 and of 4.3.
 */
public class BrokerKeys {
    private static final List<String> NUMBERS = List.of(
        "-9223372036854775809", "-9223372036854775808", "-2147483649", "-2147483648", "-32769", "-32768",
        "-2", "-1", "0", "1", "2", "10", "1000", "32767", "32768", "2147483647", "2147483648",
        "9223372036854775807", "9223372036854775808", "0.5", "x", "");
    private static final Pattern NUMBER = Pattern.compile("-?\\d+");
    private static final Pattern WORD = Pattern.compile("[\\w.-]+");

    public static void main(String[] none) throws Exception {
        Set<String> dynamic = dynamic();
        for (ConfigDef.ConfigKey key : AbstractKafkaConfig.CONFIG_DEF.configKeys().values()) {
            StringBuilder accepted = new StringBuilder();
            StringBuilder refused = new StringBuilder();
            for (String text : texts(key)) (accepts(key, text) ? accepted : refused).append(text).append('|');
            boolean hasNone = key.defaultValue == null || key.defaultValue == ConfigDef.NO_DEFAULT_VALUE;
            System.out.println(String.join("\t", key.name, key.type.name(),
                hasNone ? "-" : '"' + ConfigDef.convertToString(key.defaultValue, key.type) + '"',
                String.valueOf(dynamic.contains(key.name)), accepted, refused));
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
