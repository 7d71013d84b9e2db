"""What passes between partitions: relayed tensors, on the device or in host memory."""
