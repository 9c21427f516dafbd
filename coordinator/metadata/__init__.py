"""What the broker knows of topics, features and settings, and how that is changed."""
