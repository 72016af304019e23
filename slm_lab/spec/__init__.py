"""Specs: what a person writes in JSON, validated into frozen typed objects. Imports neither torch nor anything that draws."""
