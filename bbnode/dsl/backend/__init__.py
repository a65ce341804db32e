"""Ops of `ai.onnx` on a backend's slot."""
