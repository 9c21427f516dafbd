"""A Kafka broker for tests: fixtures, a clock that the test owns, faults.

``pip install 'fencepost[pytest]'`` is all that a project needs: pytest finds ``plugin`` by itself.
"""
