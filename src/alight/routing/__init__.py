"""Which model is called? Logs of models become tables, and requests are routed by a policy under a budget."""
