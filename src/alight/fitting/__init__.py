"""From a network to a predictor within a budget: the steps of `alight.fit`, each a function of its own."""
