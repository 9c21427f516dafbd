"""Tools for stopped brokers: moving logs, promotion and demotion; and the crash sweep."""
