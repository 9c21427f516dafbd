// Command failover is franz-go's part of tests/oracle/failover: see the Python package there.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const partitions = 3

var (
	bootstrap, name, stop            = os.Args[1], os.Args[2], os.Args[3]
	sent, acknowledged, seen, copied atomic.Int64
)

func tell(role, where string, err error) {
	fmt.Println("ERROR", role, where+":", strings.ReplaceAll(err.Error(), "\n", " "))
}

// told reports the library's warnings and errors.
type told string

func (told) Level() kgo.LogLevel { return kgo.LogLevelWarn }

func (role told) Log(level kgo.LogLevel, message string, pairs ...any) {
	errs := ""
	for at := 0; at+1 < len(pairs); at += 2 {
		if pairs[at] == "err" {
			errs += fmt.Sprint(": ", pairs[at+1])
		}
	}
	tell(string(role), "log "+level.String(), fmt.Errorf("%s%s", message, errs))
}

func options(role string, more ...kgo.Opt) []kgo.Opt {
	return append([]kgo.Opt{
		kgo.SeedBrokers(strings.Split(bootstrap, ",")...),
		kgo.WithLogger(told(role)),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	}, more...)
}

func grouped(role string, more ...kgo.Opt) []kgo.Opt {
	return options(role, append([]kgo.Opt{
		kgo.ConsumeTopics("in-" + name),
		kgo.ConsumerGroup(role + "-" + name),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.DisableAutoCommit(),
		kgo.SessionTimeout(10*time.Second), // soon removes a member whose LeaveGroup got lost
	}, more...)...)
}

func write() {
	client, err := kgo.NewClient(options("writer", kgo.ProducerLinger(5*time.Millisecond))...)
	if err != nil {
		panic(err)
	}
	for {
		if _, err := os.Stat(stop); err == nil {
			break
		}
		for index := range int32(partitions) {
			value := fmt.Sprint(sent.Add(1) - 1)
			record := &kgo.Record{Topic: "in-" + name, Partition: index, Value: []byte(value)}
			client.Produce(context.Background(), record, func(_ *kgo.Record, err error) {
				if err != nil {
					tell("writer", "delivery", err)
				} else {
					acknowledged.Add(1)
				}
			})
		}
		time.Sleep(60 * time.Millisecond)
	}
	if err := client.Flush(context.Background()); err != nil {
		tell("writer", "flush", err)
	}
	fmt.Println("SENT", sent.Load())
}

// found returns the records of a poll, and reports its errors.
func found(role string, poll func(context.Context) kgo.Fetches) []*kgo.Record {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	fetches := poll(ctx)
	fetches.EachError(func(_ string, _ int32, err error) {
		if ctx.Err() == nil {
			tell(role, "poll", err)
		}
	})
	return fetches.Records()
}

func read() {
	client, err := kgo.NewClient(grouped("reader")...)
	if err != nil {
		panic(err)
	}
	values := map[string]bool{}
	for {
		records := found("reader", client.PollFetches)
		for _, record := range records {
			values[string(record.Value)] = true
		}
		seen.Store(int64(len(values)))
		if len(records) == 0 {
			continue
		}
		if err := client.CommitUncommittedOffsets(context.Background()); err != nil {
			tell("reader", "commit", err)
		}
	}
}

func transact() error {
	session, err := kgo.NewGroupTransactSession(grouped("copier",
		kgo.TransactionalID("copier-"+name), kgo.RequireStableFetchOffsets())...)
	if err != nil {
		return err
	}
	defer session.Close()
	for {
		records := found("copier", session.PollFetches)
		if len(records) == 0 {
			continue
		}
		if err := session.Begin(); err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		failed := kgo.AbortingFirstErrPromise(session.Client())
		for _, record := range records {
			copied := &kgo.Record{Topic: "out-" + name, Partition: record.Partition, Value: record.Value}
			session.Produce(context.Background(), copied, failed.Promise())
		}
		refused := failed.Err()
		if refused != nil {
			tell("copier", "send", refused)
		}
		committed, err := session.End(context.Background(), kgo.TransactionEndTry(refused == nil))
		if err != nil {
			return fmt.Errorf("end: %w", err)
		}
		if committed {
			copied.Add(int64(len(records)))
		}
	}
}

func main() {
	go write()
	go read()
	go func() {
		for {
			tell("copier", "transact", transact())
		}
	}()
	for {
		time.Sleep(100 * time.Millisecond)
		fmt.Println("AT", sent.Load(), acknowledged.Load(), seen.Load(), copied.Load())
	}
}
