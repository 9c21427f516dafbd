import com.fasterxml.jackson.databind.JsonNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.ObjectSerializationCache;

/** Decodes lines of a message's name, version and bytes; prints the message as JSON, a tab, and its encoded bytes. */
public class MessageJudge {
    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split(" ", -1);
            short version = Short.parseShort(words[1]);
            String name = "org.apache.kafka.common.message." + words[0] + "Data";
            Class<?> kind = Class.forName(name);
            ByteBuffer given = ByteBuffer.wrap(HexFormat.of().parseHex(words[2]));
            ApiMessage message = (ApiMessage) kind.getConstructor().newInstance();
            message.read(new ByteBufferAccessor(given), version);
            if (given.hasRemaining()) {
                throw new IllegalStateException(given.remaining() + " bytes are left of " + line);
            }
            JsonNode json = (JsonNode) Class.forName(name + "JsonConverter")
                .getMethod("write", kind, short.class).invoke(null, message, version);
            ObjectSerializationCache cache = new ObjectSerializationCache();
            ByteBuffer written = ByteBuffer.allocate(message.size(cache, version));
            message.write(new ByteBufferAccessor(written), cache, version);
            System.out.println(json + "\t" + HexFormat.of().formatHex(written.array()));
        }
    }
}
