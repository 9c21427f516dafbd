"""Limits on the load of the console and the brokers; the page shows when a limit is reached."""

from __future__ import annotations

MAX_CALLS = 4
"""The maximum number of concurrent queries to the brokers; further queries wait."""

MAX_CLIENTS = 64
"""The maximum number of concurrent streams: open pages, and searches."""

MAX_UNAUTHENTICATED = 32
"""The maximum number of connections that have not shown the token; a further one replaces the
oldest."""

AUTHENTICATION_TIMEOUT_S = 10.0
"""How long a connection may take to show the token, including its TLS handshake."""

MAX_SEARCHES = 8
"""The maximum number of concurrent searches, which are the most expensive streams."""

MIN_INTERVAL_S = 0.5
"""The shortest time between two events of one stream."""

REST_FACTOR = 4
"""The pause after a refresh, as a multiple of the time that the refresh took."""

PULSE_S = 0.5
"""The pause between two checks of the brokers while a page is open."""

PULSE_TIMEOUT_S = 1.0
"""How long a broker may take to answer before a page reports it as silent."""

KEEPALIVE_S = 15.0
"""The time between two comments on a stream without events."""

MAX_PAGE = 200
"""The maximum number of rows in one page of a list."""

MAX_BODY_BYTES = 1 << 20
"""The maximum size of a request's body."""

HISTORY_ENTRIES = 20_000
"""The maximum number of history entries in memory; the newest are kept."""

TIMELINE_ENTRIES = 500
"""The maximum number of history entries in one answer, which has the newest."""

MAX_ROWS = 1_000
"""The maximum number of records that one search shows."""

SHOWN_BYTES = 4 << 10
"""The maximum number of bytes of a key or value in a list of records; the view of one record shows
more."""

RECORD_BYTES = 1 << 20
"""The maximum number of bytes of a key or value in the view of one record."""

SHOWN_HEADERS = 50
"""The maximum number of headers that are shown of one record."""

STEP_BYTES = 1 << 20
"""The number of bytes that a search fetches between two reports of its progress."""

BUDGET_RECORDS = 500_000
"""The number of records that a search scans before it asks whether to continue."""

BUDGET_BYTES = 256 << 20
"""The number of bytes that a search fetches before it asks whether to continue."""
