"""The documentation: its pages, and programs that write generated parts (``make readme``)."""
