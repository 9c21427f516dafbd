import java.io.DataInputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.flink.runtime.checkpoint.Checkpoints;
import org.apache.flink.runtime.checkpoint.OperatorState;
import org.apache.flink.runtime.checkpoint.OperatorSubtaskState;
import org.apache.flink.runtime.state.OperatorStateHandle;
import org.apache.flink.runtime.state.filesystem.FileStateHandle;

/**
 * Prints the path and the size of each file with operator state that a checkpoint names.
 *
 * <p>Argument: a {@code _metadata} file.
 */
public final class FlinkPaths {
    public static void main(String[] arguments) throws Exception {
        Path file = Path.of(arguments[0]).toAbsolutePath();
        try (var in = new DataInputStream(Files.newInputStream(file))) {
            var metadata = Checkpoints.loadCheckpointMetadata(
                in, FlinkPaths.class.getClassLoader(), file.getParent().toUri().toString());
            for (OperatorState operator : metadata.getOperatorStates()) {
                for (OperatorSubtaskState subtask : operator.getStates()) {
                    for (OperatorStateHandle handle : subtask.getManagedOperatorState()) {
                        if (handle.getDelegateStateHandle() instanceof FileStateHandle state) {
                            System.out.println(state.getFilePath() + " " + state.getStateSize());
                        }
                    }
                }
            }
        }
    }
}
