"""Programs of several clients that do the same while brokers go, each telling every error it sees.

Each is started with BOOTSTRAP NAME FILE, and what itself asks for (MORE). It writes numbers to the
three partitions of ``in-NAME`` in turn, as an idempotent producer, until FILE exists; reads them in
the group ``reader-NAME``, which commits; and copies them to ``out-NAME`` in transactions, offsets
and all, in the group ``copier-NAME``. It is ended by a kill. Lines of its output:

* ``AT sent acknowledged read copied``, four counts, every 100 ms;
* ``ERROR role what``, the role one of ``writer``, ``reader``, ``copier``;
* ``SENT number``, once the writer has stopped and knows of every record what came of it.
"""
