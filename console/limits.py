"""What the console may take, of itself and of the broker. Every limit is told when it is hit."""

from __future__ import annotations

MAX_CALLS = 4
"""Questions to the brokers at the same time; others wait."""

MAX_CLIENTS = 64
"""Streams at the same time: open pages, and searches."""

MAX_STRANGERS = 32
"""Connections that have not shown the token; the next one takes the place of the oldest."""

STRANGER_S = 10.0
"""How long a connection may take to show it, its TLS handshake among that."""

MAX_SEARCHES = 8
"""Searches at the same time, which are the dear ones among the streams."""

MIN_INTERVAL_S = 0.5
"""Between two events of one stream, so that a page gets two per second at most."""

REST_FACTOR = 4
"""A view that took so long to compute is left alone for that many times as long."""

PULSE_S = 0.5
"""Between two looks whether the brokers answer, while a page is open."""

PULSE_TIMEOUT_S = 1.0
"""How long a broker may take to answer before a page says that it does not."""

KEEPALIVE_S = 15.0
"""Between two comments of a stream that has nothing to tell."""

MAX_PAGE = 200
"""Rows of one page of a list."""

MAX_BODY_BYTES = 1 << 20
"""Of a request."""

HISTORY_ENTRIES = 20_000
"""Entries of the history that are kept in memory: the newest."""

TIMELINE_ENTRIES = 500
"""Entries of the history that one answer shows: the newest."""

MAX_ROWS = 1_000
"""Records that one search shows."""

SHOWN_BYTES = 4 << 10
"""Bytes of one key or value in a list of records; the record itself shows more."""

RECORD_BYTES = 1 << 20
"""Bytes of one key or value of a record that is looked at by itself."""

SHOWN_HEADERS = 50
"""Headers of one record."""

STEP_BYTES = 1 << 20
"""Bytes that a search fetches before it tells how far it is."""

BUDGET_RECORDS = 500_000
"""Records that a search looks at before it asks whether to go on."""

BUDGET_BYTES = 256 << 20
"""Bytes that a search fetches before it asks whether to go on."""
