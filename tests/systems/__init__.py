"""The broker without the calls that macOS and Windows lack, and with their behaviour emulated."""
