"""A plug-in that fails as it is imported."""

raise RuntimeError("this plug-in is broken")
