"""Specs: what a person writes in JSON, validated into frozen typed objects. Imports neither torch nor pandas."""
