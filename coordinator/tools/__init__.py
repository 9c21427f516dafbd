"""What is done beside serving: moving logs, sweeping through crashes, writing the README."""
