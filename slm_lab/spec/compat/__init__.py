"""Compatibility of specs with the library SLM Lab and other libraries: names of envs and keys, older spec formats, and differences from SLM
Lab."""
