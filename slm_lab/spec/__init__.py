"""Specs: JSON descriptions of training runs, which this package validates and converts to frozen typed objects.

The package `slm_lab.spec` imports none of the large libraries torch, pandas and plotly.
"""
