"""The main job in a minute: digits live, all methods on recordings, and a report."""
