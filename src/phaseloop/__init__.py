"""An LLM server in which prompt processing and token generation never share the engine."""

__version__ = "0.1.0"
