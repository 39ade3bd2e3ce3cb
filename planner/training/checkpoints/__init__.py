"""What a training has learned, kept, and put back into an ONNX file."""
