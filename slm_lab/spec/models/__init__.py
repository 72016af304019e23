"""Frozen pydantic models that define the sections and keys of a spec."""
