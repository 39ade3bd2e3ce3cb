"""PyTorch module -> ONNX file, such that training the file trains the module.

A factory makes the module and example inputs. torch.onnx.export traces it, with translations of our
own. The graph gets the module's ties and is tidied, compared with the module, and written with the
record of the module's tensors.
"""
