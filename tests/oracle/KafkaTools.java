// Runs the main methods of Apache Kafka's tools, one after the other, in one JVM.
//
// Each line of standard input is a JSON object: "main" is the class, "args" its arguments, "in" its
// standard input, "limit_ms" the time after which it is ended, and "stays" whether it continues to
// work in other threads after its main method has returned. The response is a line "RESULT " with
// JSON: "status", -1 for a tool that did not end, and "out", its standard output and error.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.common.utils.internals.Exit;

public class KafkaTools {
    /** Writes to the present tool's output, also if a class has stored the stream in a field. */
    private static final class Switch extends OutputStream {
        private volatile OutputStream target = OutputStream.nullOutputStream();

        @Override
        public void write(int one) throws java.io.IOException {
            target.write(one);
        }

        @Override
        public void write(byte[] bytes, int from, int count) throws java.io.IOException {
            target.write(bytes, from, count);
        }
    }

    private static final class Source extends InputStream {
        private volatile InputStream target = InputStream.nullInputStream();

        @Override
        public int read() throws java.io.IOException {
            return target.read();
        }

        @Override
        public int read(byte[] bytes, int from, int count) throws java.io.IOException {
            return target.read(bytes, from, count);
        }
    }

    private static final class Ended extends Error {
        Ended(int status) {
            super("exit " + status, null, false, false);
        }
    }

    private static final Switch SAID = new Switch();
    private static final Source READ = new Source();
    private static final AtomicReference<Integer> ENDS = new AtomicReference<>();
    private static final List<Runnable> HOOKS = new ArrayList<>();

    public static void main(String[] words) throws Exception {
        var answers = new PrintStream(new FileOutputStream(FileDescriptor.out), true, "UTF-8");
        var asked = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        var said = new PrintStream(SAID, true, "UTF-8");
        System.setOut(said);
        System.setErr(said);
        System.setIn(READ);
        Exit.Procedure end = (status, message) -> {
            if (message != null) {
                System.err.println(message);
            }
            // Keep the first status: a tool may catch the error and then exit a second time.
            ENDS.compareAndSet(null, status);
            throw new Ended(status);
        };
        Exit.setExitProcedure(end);
        Exit.setHaltProcedure(end);
        Exit.setShutdownHookAdder((name, hook) -> HOOKS.add(hook));
        var mapper = new ObjectMapper();
        for (String line = asked.readLine(); line != null; line = asked.readLine()) {
            answers.println("RESULT " + mapper.writeValueAsString(run(mapper.readTree(line))));
        }
        // Threads that tools have left behind must not keep the JVM running.
        Runtime.getRuntime().halt(0);
    }

    private static Map<String, Object> run(JsonNode job) throws Exception {
        var out = new ByteArrayOutputStream();
        SAID.target = out;
        READ.target = new ByteArrayInputStream(job.get("in").asText().getBytes(StandardCharsets.UTF_8));
        HOOKS.clear();
        ENDS.set(null);
        var args = new ArrayList<String>();
        job.get("args").forEach(word -> args.add(word.asText()));
        var status = new int[] {-1};
        var main = Class.forName(job.get("main").asText()).getMethod("main", String[].class);
        var tool = new Thread(() -> {
            try {
                main.invoke(null, (Object) args.toArray(new String[0]));
                status[0] = 0;
            } catch (InvocationTargetException thrown) {
                status[0] = 1;
                if (!(thrown.getCause() instanceof Ended)) {
                    thrown.getCause().printStackTrace();
                }
            } catch (IllegalAccessException refused) {
                throw new AssertionError(refused);
            }
        });
        tool.setDaemon(true);
        tool.start();
        tool.join(job.get("limit_ms").asLong());
        if (job.get("stays").asBoolean()) {
            Thread.sleep(job.get("limit_ms").asLong());
        }
        // Run the shutdown hooks, as a JVM does at its end: a console producer sends its remaining
        // records there, which must not happen while the next tool runs.
        for (Runnable hook : new ArrayList<>(HOOKS)) {
            var ending = new Thread(hook);
            ending.setDaemon(true);
            ending.start();
            ending.join(5_000);
        }
        tool.join(5_000);
        if (tool.isAlive()) {
            tool.interrupt();
            tool.join(2_000);
        }
        SAID.target = OutputStream.nullOutputStream();
        int end = ENDS.get() == null ? status[0] : ENDS.get();
        return Map.of("status", end, "out", out.toString(StandardCharsets.UTF_8));
    }
}
