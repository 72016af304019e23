"""Names and spec formats of SLM Lab and other libraries, and differences from SLM Lab."""
