// Command clientlogins produces a record and reads it back with franz-go for each login. A line of
// standard input describes a login as JSON; a line of output says "ok", or has the error.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

type login struct {
	Bootstrap, Topic, Mechanism, User, Password, Token string
	Authority, Certificate                             string
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var one login
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			panic(err)
		}
		if err := exchange(one); err != nil {
			fmt.Println(strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Println("ok")
		}
	}
}

func exchange(one login) error {
	options := []kgo.Opt{
		kgo.SeedBrokers(one.Bootstrap),
		kgo.ConsumeTopics(one.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.RecordDeliveryTimeout(10 * time.Second),
	}
	if one.Authority != "" {
		config, err := encryption(one)
		if err != nil {
			return err
		}
		options = append(options, kgo.DialTLSConfig(config))
	}
	switch one.Mechanism {
	case "PLAIN":
		options = append(options, kgo.SASL(plain.Auth{User: one.User, Pass: one.Password}.AsMechanism()))
	case "SCRAM-SHA-256":
		options = append(options, kgo.SASL(scram.Auth{User: one.User, Pass: one.Password}.AsSha256Mechanism()))
	case "SCRAM-SHA-512":
		options = append(options, kgo.SASL(scram.Auth{User: one.User, Pass: one.Password}.AsSha512Mechanism()))
	case "OAUTHBEARER":
		options = append(options, kgo.SASL(oauth.Auth{Token: one.Token}.AsMechanism()))
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := client.Ping(ctx); err != nil {
		return err
	}
	if err := client.ProduceSync(ctx, &kgo.Record{Topic: one.Topic, Value: []byte("go")}).FirstErr(); err != nil {
		return err
	}
	for {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return err
		}
		for _, record := range fetches.Records() {
			if string(record.Value) == "go" {
				return nil
			}
		}
	}
}

func encryption(one login) (*tls.Config, error) {
	authority, err := os.ReadFile(one.Authority)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(authority)
	if one.Certificate != "" {
		certificate, err := tls.LoadX509KeyPair(one.Certificate, one.Certificate)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return config, nil
}
