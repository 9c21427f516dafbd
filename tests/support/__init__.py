"""The shared drivers of the slow tests: brokers to start, states to wait for, requests to send."""
