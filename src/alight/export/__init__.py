"""A trained network and its policy become files that run elsewhere, without PyTorch; exporting needs it."""
