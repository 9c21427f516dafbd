// Command kfake serves franz-go's broker in memory on one port until SIGTERM.
package main

import (
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func main() {
	port, err := strconv.Atoi(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.Ports(port))
	if err != nil {
		log.Fatal(err)
	}
	cluster.ControlKey(int16(kmsg.OffsetFetch), func(request kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		// A client asks so whether the coordinator serves. Apache Kafka answers NONE for an
		// unknown group, and kfake GROUP_ID_NOT_FOUND.
		fetch := request.(*kmsg.OffsetFetchRequest)
		return fetch.ResponseKind(), nil, fetch.Version == 5 && len(fetch.Topics) == 0
	})
	fmt.Printf("listening 127.0.0.1:%d\n", port)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	<-ended
	cluster.Close()
}
