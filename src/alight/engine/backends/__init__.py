"""What executes stages: PyTorch, ONNX Runtime, AOTInductor."""
