"""The documentation: its pages, and what writes their generated parts (``make readme``)."""
