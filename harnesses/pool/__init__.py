"""One name in front of several engines, and the ways to reach them."""
