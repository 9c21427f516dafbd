"""Programs with different client libraries, which work while brokers fail, and report errors.

All programs do the same work. A program is started with the arguments BOOTSTRAP NAME FILE, which
may be followed by arguments of only this program (MORE). An idempotent producer writes numbers to
the three partitions of ``in-NAME`` in turn, until FILE exists. The group ``reader-NAME`` reads the
numbers and commits offsets. The group ``copier-NAME`` copies the numbers to ``out-NAME`` in
transactions that include the offsets. The test kills the program at the end. The program prints
these lines:

* ``AT sent acknowledged read copied``, four counts, every 100 ms;
* ``ERROR role what``, where the role is ``writer``, ``reader`` or ``copier``;
* ``SENT number``, when the writer has stopped and knows the outcome of every record.
"""
