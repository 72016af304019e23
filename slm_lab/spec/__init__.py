"""Specs: JSON descriptions of trainings, which are validated and converted to frozen typed objects.

This package imports no heavy package (torch, pandas, plotly).
"""
