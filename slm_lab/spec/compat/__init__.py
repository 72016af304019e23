"""Names, forms and differences of SLM Lab and other libraries."""
