"""The experiments: trial, search and study."""
