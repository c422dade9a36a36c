"""What starts HEAR's parts, finds them, and joins them to a bus: all that is not protocol."""
