"""The web console: a separate process that is a client of any Kafka broker.

``server.py`` is the process: routes, JSON, the page. ``guard.py`` authorizes requests,
``sessions.py`` queries the brokers in threads outside the event loop, and ``live.py`` refreshes a
view while a page shows it. The other modules are views: functions from a session and a request's
parameters to plain data, which is sent as JSON, or as a stream of events with ``Accept:
text/event-stream``.
"""
