"""The transaction coordinator's state machine: producer ids, epochs, states, markers. Pure."""
