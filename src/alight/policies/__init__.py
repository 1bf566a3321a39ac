"""Does it leave? The rules, and the one walk through the exits."""
