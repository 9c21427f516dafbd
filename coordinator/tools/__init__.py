"""What is done beside serving: moving logs, and sweeping through crashes."""
