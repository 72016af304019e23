"""What fits together in a valid spec, and how it is resolved."""
