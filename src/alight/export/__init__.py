"""A trained network and its policy become files that run elsewhere; needs PyTorch, which `alight.deploy` does not."""
