"""The web console: a process of its own, which is a client of any Kafka broker.

``server.py`` is the process: routes, JSON, the page. ``guard.py`` decides who may ask,
``sessions.py`` asks the broker outside of the loop, ``live.py`` keeps asking while somebody
watches. The other modules are views: functions from a session and a request's parameters to plain
data, which is a JSON answer and, with ``Accept: text/event-stream``, a stream of such.
"""
