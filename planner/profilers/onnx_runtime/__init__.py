"""Times of operators in ONNX Runtime."""
