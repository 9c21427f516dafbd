"""The broker without the calls that macOS or Windows lacks, with these systems' behaviour."""
