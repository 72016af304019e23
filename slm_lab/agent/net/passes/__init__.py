"""How a net runs forward and backward: faster than its modules do, as long as it computes what they would (validity.py)."""
