"""Programs of several clients. They do the same work while brokers fail, and report every error.

Each is started with the arguments BOOTSTRAP NAME FILE, and further ones that only this program has
(MORE). It writes numbers to the three partitions of ``in-NAME`` in turn, as an idempotent producer,
until FILE exists. It reads them in the group ``reader-NAME``, which commits, and copies them to
``out-NAME`` in transactions, including the offsets, in the group ``copier-NAME``. The test kills
the program at the end. Lines of its output:

* ``AT sent acknowledged read copied``, four counts, every 100 ms;
* ``ERROR role what``, where the role is ``writer``, ``reader`` or ``copier``;
* ``SENT number``, when the writer has stopped and knows the outcome of every record.
"""
