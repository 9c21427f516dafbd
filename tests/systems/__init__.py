"""The broker without calls that macOS or Windows lacks, and with their behaviour emulated."""
