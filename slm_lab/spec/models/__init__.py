"""What the keys of a spec mean: frozen pydantic models."""
