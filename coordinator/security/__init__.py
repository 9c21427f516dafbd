"""Authentication, authorization and quotas of clients, without sockets and messages."""
