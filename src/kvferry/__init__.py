"""kvferry: an LLM token-inference server with prefill and decode on separate devices.

The folders of this package are links to those at the top of the repository (ADR 0028); an installed package holds the
folders themselves. Must import nothing.
"""
