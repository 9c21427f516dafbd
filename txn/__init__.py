"""The transaction coordinator's state machine: producer ids, epochs, states, markers. Pure."""

if not __name__.startswith("fencepost."):
    raise ImportError("this package is fencepost.txn: import it by that name")
