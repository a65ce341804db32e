"""ONNX models, loaded and cut into Modules."""
