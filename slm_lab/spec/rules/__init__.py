"""Check which parts fit together in a valid spec, and resolve the spec."""
