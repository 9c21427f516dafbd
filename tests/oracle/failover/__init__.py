"""Programs of several clients that do the same work while brokers fail, and report every error.

Each is started with BOOTSTRAP NAME FILE and further arguments of its own (MORE). It writes numbers
to the three partitions of ``in-NAME`` in turn, as an idempotent producer, until FILE exists; reads
them in the group ``reader-NAME``, which commits; and copies them to ``out-NAME`` in transactions,
including the offsets, in the group ``copier-NAME``. The test ends it by a kill. Lines of its
output:

* ``AT sent acknowledged read copied``, four counts, every 100 ms;
* ``ERROR role what``, the role one of ``writer``, ``reader``, ``copier``;
* ``SENT number``, once the writer has stopped and has the outcome of every record.
"""
