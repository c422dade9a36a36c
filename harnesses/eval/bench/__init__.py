"""``hear bench``: policies side by side on a real engine, in real time."""
