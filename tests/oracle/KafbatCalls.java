// Makes each call of Kafbat UI's ReactiveAdminClient to Java's AdminClient once, and prints a line for each.

import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.DescribeClusterOptions;
import org.apache.kafka.clients.admin.DescribeConfigsOptions;
import org.apache.kafka.clients.admin.ListConsumerGroupOffsetsSpec;
import org.apache.kafka.clients.admin.ListTopicsOptions;
import org.apache.kafka.clients.admin.NewPartitionReassignment;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionReplica;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;

public class KafbatCalls {
    private static <T> T get(KafkaFuture<T> future) throws Exception {
        try {
            return future.get(20, TimeUnit.SECONDS);
        } catch (ExecutionException failed) {
            throw (Exception) failed.getCause();
        }
    }

    private static void tell(String what, Callable<Object> call) {
        String told;
        try {
            told = String.valueOf(call.call());
        } catch (Exception failed) {
            told = failed.getClass().getSimpleName();
        }
        System.out.println("CALL " + what + ": " + told);
    }

    public static void main(String[] words) throws Exception {
        var topic = "kafbat";
        var group = "kafbat-group";
        var zero = new TopicPartition(topic, 0);
        var ofTopic = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        try (var admin = AdminClient.create(Map.of("bootstrap.servers", words[0]))) {
            var nodes = get(admin.describeCluster().nodes());
            var id = nodes.iterator().next().id();
            var ofBroker = new ConfigResource(ConfigResource.Type.BROKER, String.valueOf(id));
            tell("createTopics", () -> get(admin.createTopics(List.of(new NewTopic(topic, Optional.of(2), Optional.empty()).configs(Map.of("retention.ms", "-1")))).all()));
            tell("describeCluster", () -> {
                var found = admin.describeCluster(new DescribeClusterOptions().includeAuthorizedOperations(true));
                return get(found.controller()).id() + " " + get(found.nodes()).size() + " " + get(found.authorizedOperations()).stream().sorted().toList();
            });
            tell("describeFeatures", () -> get(admin.describeFeatures().featureMetadata()).finalizedFeatures().get("metadata.version"));
            tell("describeAcls", () -> get(admin.describeAcls(AclBindingFilter.ANY).values()));
            tell("describeConfigs of the broker", () -> {
                var found = get(admin.describeConfigs(List.of(ofBroker), new DescribeConfigsOptions().includeSynonyms(true)).all()).get(ofBroker);
                return found.get("delete.topic.enable").value() + " " + found.get("num.partitions").value();
            });
            tell("describeConfigs of a topic", () -> {
                var found = get(admin.describeConfigs(List.of(ofTopic), new DescribeConfigsOptions().includeSynonyms(true).includeDocumentation(true)).all()).get(ofTopic);
                var entry = found.get("retention.ms");
                return entry.value() + " " + entry.source() + " " + !entry.documentation().isEmpty();
            });
            tell("listTopics", () -> get(admin.listTopics(new ListTopicsOptions().listInternal(true)).names()).contains(topic));
            tell("describeTopics", () -> get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions());
            tell("describeLogDirs", () -> {
                var dirs = get(admin.describeLogDirs(List.of(id)).allDescriptions()).get(id).values();
                var dir = dirs.iterator().next();
                return dirs.size() + " " + dir.error() + " " + dir.replicaInfos().get(zero) + " " + dir.totalBytes().isPresent() + dir.usableBytes().isPresent();
            });
            tell("describeMetadataQuorum", () -> {
                var quorum = get(admin.describeMetadataQuorum().quorumInfo());
                return quorum.leaderId() + " " + quorum.voters().size() + quorum.observers().size();
            });
            tell("describeProducers", () -> get(admin.describeProducers(List.of(zero)).all()).get(zero).activeProducers());
            tell("describeClientQuotas", () -> get(admin.describeClientQuotas(ClientQuotaFilter.all()).entities()));
            tell("listOffsets", () -> get(admin.listOffsets(Map.of(zero, OffsetSpec.earliest())).all()).get(zero).offset() + " " + get(admin.listOffsets(Map.of(zero, OffsetSpec.latest())).all()).get(zero).offset());
            tell("alterConsumerGroupOffsets", () -> get(admin.alterConsumerGroupOffsets(group, Map.of(zero, new OffsetAndMetadata(0))).all()));
            tell("listConsumerGroups", () -> get(admin.listConsumerGroups().all()).stream().filter(one -> one.groupId().equals(group)).toList());
            tell("describeConsumerGroups", () -> {
                var found = get(admin.describeConsumerGroups(List.of(group)).all()).get(group);
                return found.groupState() + " " + found.members() + " " + found.coordinator().id();
            });
            tell("listConsumerGroupOffsets", () -> get(admin.listConsumerGroupOffsets(Map.of(group, new ListConsumerGroupOffsetsSpec())).all()).get(group).get(zero).offset());
            tell("incrementalAlterConfigs of a topic", () -> get(admin.incrementalAlterConfigs(Map.of(ofTopic, List.of(new AlterConfigOp(new ConfigEntry("retention.ms", "5"), AlterConfigOp.OpType.SET)))).all()));
            tell("incrementalAlterConfigs of the broker", () -> get(admin.incrementalAlterConfigs(Map.of(ofBroker, List.of(new AlterConfigOp(new ConfigEntry("log.retention.ms", "-1"), AlterConfigOp.OpType.SET)))).all()));
            // Other tests compare the settings of the same broker.
            tell("incrementalAlterConfigs of the broker, removed", () -> get(admin.incrementalAlterConfigs(Map.of(ofBroker, List.of(new AlterConfigOp(new ConfigEntry("log.retention.ms", ""), AlterConfigOp.OpType.DELETE)))).all()));
            tell("createPartitions", () -> get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all()));
            tell("alterPartitionReassignments", () -> get(admin.alterPartitionReassignments(Map.of(zero, Optional.of(new NewPartitionReassignment(List.of(id))))).all()));
            tell("alterPartitionReassignments to more replicas", () -> get(admin.alterPartitionReassignments(Map.of(zero, Optional.of(new NewPartitionReassignment(List.of(id, id + 1))))).all()));
            tell("alterReplicaLogDirs", () -> get(admin.alterReplicaLogDirs(Map.of(new TopicPartitionReplica(topic, 0, id), get(admin.describeLogDirs(List.of(id)).allDescriptions()).get(id).keySet().iterator().next())).all()));
            tell("alterReplicaLogDirs to nowhere", () -> get(admin.alterReplicaLogDirs(Map.of(new TopicPartitionReplica(topic, 0, id), "/nowhere")).all()));
            tell("deleteRecords", () -> get(admin.deleteRecords(Map.of(zero, RecordsToDelete.beforeOffset(0))).all()));
            var right = new AclBinding(new ResourcePattern(ResourceType.TOPIC, topic, PatternType.LITERAL), new AccessControlEntry("User:a", "*", AclOperation.READ, AclPermissionType.ALLOW));
            tell("createAcls", () -> get(admin.createAcls(List.of(right)).all()));
            tell("deleteAcls", () -> get(admin.deleteAcls(List.of(right.toFilter())).all()));
            var entity = new ClientQuotaEntity(Map.of(ClientQuotaEntity.USER, "kafbat"));
            for (Double rate : Arrays.asList(1000.0, null)) {
                tell("alterClientQuotas to " + rate, () -> get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(new ClientQuotaAlteration.Op("producer_byte_rate", rate))))).all()));
            }
            tell("deleteConsumerGroupOffsets", () -> get(admin.deleteConsumerGroupOffsets(group, java.util.Set.of(zero)).all()));
            tell("deleteConsumerGroups", () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
            tell("deleteTopics", () -> get(admin.deleteTopics(List.of(topic)).all()));
        }
    }
}
