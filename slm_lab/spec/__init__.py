"""Specs: JSON validated into frozen typed objects. Imports no heavy package (torch, pandas, plotly)."""
