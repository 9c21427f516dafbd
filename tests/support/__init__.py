"""What the slow judges share: brokers to start, states to wait for, requests to send."""
