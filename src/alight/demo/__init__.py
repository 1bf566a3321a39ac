"""The demo: a network with exits learns digits and runs on half of its compute."""
