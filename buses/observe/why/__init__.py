"""``hear why``: the story of one request, told from what was heard on the bus."""
