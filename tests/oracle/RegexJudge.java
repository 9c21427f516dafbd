import com.google.re2j.Pattern;
import com.google.re2j.PatternSyntaxException;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import java.util.List;
import java.util.stream.Stream;

/** Matches names with RE2/J as Kafka's coordinator does: the first line has the names, each further line a regex. */
public class RegexJudge {
    public static void main(String[] arguments) throws IOException {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        List<String> names = Stream.of(in.readLine().split(" ")).map(RegexJudge::decoded).toList();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String regex = decoded(line);
            StringBuilder answer = new StringBuilder();
            try {
                Pattern pattern = Pattern.compile(regex);
                for (String name : names) {
                    answer.append(pattern.matcher(name).matches() ? '1' : '0');
                }
            } catch (PatternSyntaxException refused) {
                answer.append("refused: ").append(refused.getDescription());
            } catch (RuntimeException failed) {
                answer.append("failed: ").append(failed);
            }
            System.out.println(answer);
        }
    }

    private static String decoded(String hex) {
        return new String(HexFormat.of().parseHex(hex), StandardCharsets.UTF_8);
    }
}
